"""Weights and layer inputs that leave a card and come back: the bits of a model that stays on it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from streamed_session import Session, assert_equal, saved, tiny_config

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


CARD = torch.device("cuda")


@pytest.mark.parametrize("weights", ["device", "host", "disk"])
@pytest.mark.parametrize("activations", ["recompute", "host", "disk"])
def test_no_bit_changes(tmp_path, weights, activations):
    source = saved(tiny_config("llama", num_hidden_layers=5), tmp_path)
    with Session(source, "device", tmp_path, micro_batches=2, device=CARD) as plain:
        losses = plain.train(3, 2)
        expected = plain.weights()
    options = {"micro_batches": 2, "activations": activations, "device": CARD}
    with Session(source, weights, tmp_path, **options) as session:
        assert session.train(3, 2) == losses
        assert_equal(session.weights(), expected)


def test_the_card_holds_two_layers(tmp_path):
    config = tiny_config("llama", num_hidden_layers=12, hidden_size=512, intermediate_size=2048)
    source = saved(config, tmp_path)
    peaks = {}
    for where in ("device", "host"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with Session(source, where, tmp_path, device=CARD) as session:
            session.train(1)
            peaks[where] = torch.cuda.max_memory_allocated() - before
    assert peaks["host"] < peaks["device"] / 2
