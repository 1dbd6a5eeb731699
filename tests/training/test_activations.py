"""The activation meter: counts what autograd holds, and changes no bit of what is computed."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.models.recompute import recompute_layers
from headrace.training.activations import ActivationMeter

FP32 = 4


class Square(nn.Module):
    """Saves the input of each product, and of its matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x_ND: Tensor) -> Tensor:
        y_ND = x_ND @ self.weight
        return y_ND * y_ND


def test_products_are_counted_by_hand() -> None:
    model, x_ND = Square(8), torch.randn(5, 8)
    meter = ActivationMeter(model)
    with meter:
        loss = model(x_ND).sum()
        assert meter.peak == (5 * 8 + 5 * 8) * FP32  # x, and y once though it is saved twice
        loss.backward()
    assert meter.peak == 80 * FP32


def test_views_of_one_storage_count_once_and_in_full() -> None:
    meter = ActivationMeter(nn.Module())
    x_ND = torch.randn(6, 8, requires_grad=True) * 1.0
    with meter:
        left, right = x_ND[:, :4], x_ND[:, 4:]
        (left * right).sum().backward()
    assert meter.peak == 6 * 8 * FP32


def test_parameters_and_buffers_do_not_count() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.randn(4))
    meter = ActivationMeter(model)
    with meter:
        (functional.linear(torch.zeros(0, 4), model.weight) * model.table).sum().backward()
    assert meter.peak == 0


def test_what_backward_lets_go_of_is_not_counted_with_the_next_micro_batch() -> None:
    model = Square(8)
    meter = ActivationMeter(model)
    for _ in range(3):
        x_ND = torch.randn(5, 8)  # lives on while the next one is measured
        with meter:
            model(x_ND).sum().backward()
    assert meter.peak == 80 * FP32


def test_a_graph_that_is_dropped_without_backward_frees_its_memory() -> None:
    model, meter = Square(8), ActivationMeter(nn.Module())
    with meter:
        result = model(torch.randn(5, 8))
    del result
    with meter:
        model(torch.randn(1, 8)).sum().backward()
    assert meter.peak == 80 * FP32


def test_an_operation_that_saves_its_own_result_makes_no_cycle() -> None:
    meter = ActivationMeter(nn.Module())
    gc.collect()
    gc.disable()
    try:
        with meter:
            result = torch.randn(3, requires_grad=True).exp()
        gone = weakref.ref(result)
        del result
        assert gone() is None
    finally:
        gc.enable()


def test_a_recomputed_layer_counts_its_input_and_what_it_saves_again() -> None:
    layers, x_ND = [Square(8) for _ in range(4)], torch.randn(5, 8, requires_grad=True)
    meter = ActivationMeter(nn.ModuleList(layers))
    with meter:
        y_ND = x_ND * 1.0
        for layer in layers:
            y_ND = checkpoint(layer, y_ND, use_reentrant=False, context_fn=meter.contexts)
        loss = y_ND.sum()
        assert meter.peak == 4 * 40 * FP32
        loss.backward()
    assert meter.peak == (4 * 40 + 40) * FP32


def test_temporaries_of_a_recomputation_do_not_count() -> None:
    def layer(x_ND: Tensor) -> Tensor:
        wide = torch.cat([x_ND] * 50)  # kept alive by the frame that the recomputation leaves in the middle
        return (wide[: len(x_ND)] * 2.0).exp()

    x_ND = torch.randn(5, 8, requires_grad=True)
    meter = ActivationMeter(nn.Module())
    with meter:
        checkpoint(layer, x_ND, use_reentrant=False, context_fn=meter.contexts).sum().backward()
    assert meter.peak == (40 + 40) * FP32


def test_contexts_do_nothing_unless_the_meter_is_entered() -> None:
    meter = ActivationMeter(nn.Module())
    x_ND = torch.randn(5, 8, requires_grad=True)
    checkpoint(torch.exp, x_ND, use_reentrant=False, context_fn=meter.contexts).sum().backward()
    assert meter.peak == 0


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype).train()


def gradients(model: LlamaForCausalLM, meter: ActivationMeter | None) -> list[Tensor]:
    model.zero_grad()
    ids_BL = torch.arange(40).view(2, 20) % 64
    if meter is None:
        model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss.backward()
    else:
        with meter:
            model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_the_gradients_changes(dtype: torch.dtype, recompute: bool) -> None:
    model = llama(dtype)
    meter = ActivationMeter(model)
    if recompute:
        recompute_layers(model)
    plain = gradients(model, None)
    if recompute:
        recompute_layers(model, meter.contexts)
    measured, again = gradients(model, meter), gradients(model, None)
    assert meter.peak > 0
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, measured, again, strict=True)
    )


def test_it_costs_nothing_that_grows_with_the_steps() -> None:
    model = llama(torch.float32)
    meter = ActivationMeter(model)
    recompute_layers(model, meter.contexts)
    gradients(model, meter)
    first = meter.peak
    for _ in range(3):
        gradients(model, meter)
    assert meter.peak == first
    assert not meter._references and not meter._owners
