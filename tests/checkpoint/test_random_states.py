import json
import random

import numpy as np
import pytest
import torch

from headrace.checkpoint.rng import capture_rng, restore_rng


def draw():
    """Draws that also use what the generators keep back of a pair of normal numbers."""
    return [
        *(random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()),
        *torch.randn(3).tolist(),
        *torch.randn(17).tolist(),
        *torch.randperm(9).tolist(),
    ]


@pytest.mark.parametrize("draws", range(3))
def test_draws_repeat_after_a_round_trip_through_json(draws):
    for _ in range(draws):
        draw()
    state = json.loads(json.dumps(capture_rng()))
    wanted = [draw(), draw()]
    restore_rng(state)
    assert [draw(), draw()] == wanted
    assert json.loads(json.dumps(state)) == state


def test_capturing_draws_nothing():
    assert capture_rng() == capture_rng()


def test_another_number_of_cuda_devices_is_warned_of():
    state = capture_rng()
    with pytest.warns(UserWarning, match="CUDA devices"):
        restore_rng({**state, "cuda": [*state["cuda"], state["torch"]]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_draws_on_cuda_repeat():
    state = json.loads(json.dumps(capture_rng()))
    wanted = torch.rand(5, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.rand(5, device="cuda"), wanted)
