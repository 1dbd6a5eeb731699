"""Published names against what transformers itself saves."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import build

from headrace.models.published import published_names
from headrace.models.save import model_entries

EXPERTS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", *EXPERTS])
def test_names_and_values_are_those_of_save_pretrained(tmp_path, family):
    model = build(family, torch.bfloat16, **EXPERTS.get(family, {}))
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    entries = {entry.name: entry for entry in model_entries(model)}
    assert entries.keys() == expected.keys()
    for name, entry in entries.items():
        (piece,) = entry.pieces()
        assert torch.equal(piece.view(entry.shape), expected[name]), name
        assert piece.untyped_storage().data_ptr() in {
            parameter.untyped_storage().data_ptr() for parameter in model.parameters()
        }, "nothing is copied"


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_lie_one_behind_the_other(family):
    model = build(family, **EXPERTS[family])
    stretches = published_names(model)
    own = dict(model.state_dict())
    assert len(stretches) > len(own)
    for name, tensor in own.items():
        parts = sorted((s.start, s.stop) for s in stretches.values() if s.name == name)
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == tensor.numel()


def test_a_translation_that_joins_tensors_is_not_made(tmp_path):
    model = build("hrm_text")
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() != model.state_dict().keys()
    own = {name: (name, 0, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    assert {name: (s.name, s.start, s.shape) for name, s in published_names(model).items()} == own
