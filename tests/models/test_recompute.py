"""Recomputing layers: the same gradients, less kept, and a refusal where it cannot be done."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace.errors import UserError
from headrace.models.attention import attach
from headrace.models.recompute import recompute_layers

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def build(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL))
    attach(model)
    return model.train()


def gradients(model: PreTrainedModel) -> list[Tensor]:
    model.zero_grad()
    ids_BL = torch.arange(24).view(2, 12)
    documents = ((0, 0, 5), (0, 5, 12), (1, 0, 12))
    hidden = model.get_decoder()(ids_BL, use_cache=False, documents=documents).last_hidden_state
    hidden.square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_gradients_are_the_same_to_the_bit(model_type: str) -> None:
    model = build(model_type)
    kept = gradients(model)
    recompute_layers(model)
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(model), strict=True))


def test_every_layer_runs_in_the_contexts_and_a_second_call_replaces_them() -> None:
    model, seen = build("llama"), []

    @contextmanager
    def note(what: str) -> Iterator[None]:
        seen.append(what)
        yield

    recompute_layers(model, lambda: (note("forward"), note("again")))
    gradients(model)
    assert seen == ["forward"] * 3 + ["again"] * 3
    recompute_layers(model, lambda: (nullcontext(), nullcontext()))
    gradients(model)
    assert len(seen) == 6


def test_layers_of_a_model_in_evaluation_are_not_recomputed() -> None:
    model, seen = build("llama"), []
    recompute_layers(model, lambda: (seen.append(1), nullcontext()))  # type: ignore[arg-type, return-value, func-returns-value]
    with torch.no_grad():
        model.eval()(torch.arange(6)[None], use_cache=False)
    assert not seen


def test_an_older_transformers_is_asked_by_its_own_name() -> None:
    class Older(nn.Module):
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, options: dict) -> None:
            self.options = options

    model = Older()
    recompute_layers(model)
    assert model.options["use_reentrant"] is False
    assert model.options.keys() == {"use_reentrant", "context_fn"}


def test_a_model_that_cannot_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear cannot recompute its layers: set memory.activations=keep"):
        recompute_layers(nn.Linear(2, 2))
