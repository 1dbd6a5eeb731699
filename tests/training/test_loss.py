"""The chunked loss against torch's cross-entropy on whole logits, and what it allocates."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.training.loss import Head, chunked_cross_entropy, loss_bytes, token_losses


def whole_logits(hidden_TD: Tensor, head: Head) -> Tensor:
    logits_TV = F.linear(hidden_TD, head.weight_VD, head.bias_V) * head.scale
    return logits_TV if head.softcap is None else head.softcap * torch.tanh(logits_TV / head.softcap)


def plain(hidden_TD: Tensor, head: Head, labels_T: Tensor, scale: float) -> Tensor:
    return (
        F.cross_entropy(whole_logits(hidden_TD, head), labels_T, reduction="sum", ignore_index=-100) * scale
    )


def example(
    tokens: int,
    width: int = 8,
    vocabulary: int = 31,
    dtype: torch.dtype = torch.float64,
    ignored: float = 0.3,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and labels; logits of about +-4."""
    draw = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, width, generator=draw, dtype=torch.float64)
    weight_VD = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64) * 4 / width**0.5
    bias_V = torch.randn(vocabulary, generator=draw, dtype=torch.float64)
    labels_T = torch.randint(vocabulary, (tokens,), generator=draw)
    labels_T[torch.rand(tokens, generator=draw) < ignored] = -100
    return *(x.to(dtype).requires_grad_() for x in (hidden_TD, weight_VD, bias_V)), labels_T


def loss_and_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 50),
    ignored=st.floats(0, 1),
    with_bias=st.booleans(),
    logit_scale=st.sampled_from([1.0, 0.0625]),
    softcap=st.sampled_from([None, 1.5, 30.0]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_equals_plain_cross_entropy_in_fp64(
    tokens: int,
    width: int,
    vocabulary: int,
    chunk: int,
    ignored: float,
    with_bias: bool,
    logit_scale: float,
    softcap: float | None,
    seed: int,
) -> None:
    hidden_TD, weight_VD, bias_V, labels_T = example(tokens, width, vocabulary, ignored=ignored, seed=seed)
    head = Head(weight_VD, bias_V if with_bias else None, logit_scale, softcap)
    inputs = (hidden_TD, weight_VD, *((bias_V,) if with_bias else ()))
    loss = chunked_cross_entropy(hidden_TD, head, labels_T, scale=0.05, chunk=chunk)
    ours = loss_and_gradients(loss, *inputs)
    theirs = loss_and_gradients(plain(hidden_TD, head, labels_T, 0.05), *inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert chunked_cross_entropy(hidden_TD, head, labels_T, scale=0.05, chunk=chunk) == ours[0]


# Unit roundoff is 2^-24 in fp32 and 2^-9 in bf16. Logits lie below 16 here, so an fp32 logit, and with it
# a loss, is off by a few 16 * 2^-24; gradients are sums of at most 100 terms with that relative error. In
# bf16 the logits are rounded (by up to 2^-9 * 16, which moves a probability by 3 %), then their gradient,
# then the result. Compared is the error against the fp64 truth, relative to the largest element.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("chunk", [7, 128])
def test_is_within_rounding_of_fp64(dtype: torch.dtype, bound: float, chunk: int) -> None:
    *inputs, labels_T = example(100, 16, 50, dtype)
    ours = loss_and_gradients(
        chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=1 / 64, chunk=chunk), *inputs
    )
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = loss_and_gradients(plain(exact[0], Head(*exact[1:]), labels_T, 1 / 64), *exact)
    assert [x.dtype for x in ours] == [torch.float32, dtype, dtype, dtype]
    for a, b in zip(ours, truth, strict=True):
        assert (a.double() - b).abs().max() <= bound * b.abs().max()


def test_bf16_is_no_worse_than_plain_mixed_precision() -> None:
    *inputs, labels_T = example(200, 16, 50, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = loss_and_gradients(plain(exact[0], Head(*exact[1:]), labels_T, 0.01), *exact)
    chunked = chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=0.01, chunk=16)
    logits_TV = F.linear(inputs[0], inputs[1], inputs[2]).float()
    mixed = F.cross_entropy(logits_TV, labels_T, reduction="sum") * 0.01
    ours, theirs = (loss_and_gradients(loss, *inputs) for loss in (chunked, mixed))
    for a, b, c in zip(ours, theirs, truth, strict=True):
        assert (a.double() - c).norm() <= 1.1 * (b.double() - c).norm()


def test_leading_shape_does_not_matter() -> None:
    hidden_TD, weight_VD, _, labels_T = example(24)
    flat = chunked_cross_entropy(hidden_TD, Head(weight_VD), labels_T, scale=1, chunk=5)
    rows = chunked_cross_entropy(
        hidden_TD.view(2, 12, 8), Head(weight_VD), labels_T.view(2, 12), scale=1, chunk=5
    )
    assert torch.equal(flat, rows)


def test_all_masked_gives_zero_loss_and_zero_gradients() -> None:
    *inputs, labels_T = example(9, dtype=torch.bfloat16, ignored=1)
    loss = chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=0.5, chunk=4)
    zero, *gradients = loss_and_gradients(loss, *inputs)
    assert zero == 0
    assert not any(gradient.any() for gradient in gradients)


def test_masked_hidden_states_are_never_read() -> None:
    hidden_TD, weight_VD, _, labels_T = example(20)
    labels_T[3] = -100
    poisoned_TD = hidden_TD.detach().index_fill(0, torch.tensor([3]), torch.nan).requires_grad_()
    clean, poisoned = (
        loss_and_gradients(
            chunked_cross_entropy(x, Head(weight_VD), labels_T, scale=1, chunk=6), x, weight_VD
        )
        for x in (hidden_TD, poisoned_TD)
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_a_non_finite_trained_token_shows_in_loss_and_gradients() -> None:
    hidden_TD, weight_VD, _, labels_T = example(20, ignored=0)
    hidden_TD.data[3, 0] = torch.inf
    loss, *gradients = loss_and_gradients(
        chunked_cross_entropy(hidden_TD, Head(weight_VD), labels_T, scale=1, chunk=6), hidden_TD, weight_VD
    )
    assert not any(x.isfinite().all() for x in (loss, *gradients))


def test_extreme_logits_do_not_overflow() -> None:
    hidden_TD, weight_VD, _, labels_T = example(20, dtype=torch.float32, ignored=0)
    head = Head(weight_VD, scale=1e4)
    ours = chunked_cross_entropy(hidden_TD, head, labels_T, scale=1, chunk=6)
    torch.testing.assert_close(ours, plain(hidden_TD, head, labels_T, 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen: int) -> None:
    *inputs, labels_T = example(30)
    whole = loss_and_gradients(
        chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=1, chunk=8), *inputs
    )
    inputs[frozen].requires_grad_(False)
    chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=1, chunk=8).backward()
    assert inputs[frozen].grad is None
    assert all(
        torch.equal(x.grad, g)
        for i, (x, g) in enumerate(zip(inputs, whole[1:], strict=True))
        if i != frozen and x.grad is not None
    )
    assert sum(x.grad is not None for x in inputs) == 2


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_an_outer_factor_reaches_the_gradients(factor: float) -> None:
    *inputs, labels_T = example(30)
    loss = chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=1, chunk=8)
    expected = [factor * g for g in torch.autograd.grad(loss, inputs)]
    loss = chunked_cross_entropy(inputs[0], Head(*inputs[1:]), labels_T, scale=1, chunk=8)
    torch.testing.assert_close(list(torch.autograd.grad(factor * loss, inputs)), expected, rtol=1e-15, atol=0)


def test_a_second_backward_is_refused() -> None:
    hidden_TD, weight_VD, _, labels_T = example(5)
    loss = chunked_cross_entropy(hidden_TD, Head(weight_VD), labels_T, scale=1, chunk=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run its forward again"):
        loss.backward()


def test_fp32_weight_takes_bf16_hidden_states() -> None:
    hidden_TD, weight_VD, _, labels_T = example(12, dtype=torch.float32)
    narrow_TD = hidden_TD.detach().bfloat16().requires_grad_()
    loss = chunked_cross_entropy(narrow_TD, Head(weight_VD), labels_T, scale=1, chunk=5)
    wide = chunked_cross_entropy(narrow_TD.float(), Head(weight_VD), labels_T, scale=1, chunk=5)
    loss.backward()
    assert torch.equal(loss, wide)
    assert narrow_TD.grad is not None and narrow_TD.grad.dtype == torch.bfloat16


def test_runs_are_bit_equal() -> None:
    *inputs, labels_T = example(300, 32, 500, torch.bfloat16)
    first, second = (
        loss_and_gradients(
            chunked_cross_entropy(inputs[0], Head(*inputs[1:], softcap=20.0), labels_T, scale=0.01, chunk=64),
            *inputs,
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_heads_are_summed_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_TD, weight_VD, _, labels_T = example(40, dtype=torch.bfloat16)

    def weight_gradient() -> Tensor:
        loss = chunked_cross_entropy(hidden_TD, Head(weight_VD), labels_T, scale=1, chunk=16)
        return torch.autograd.grad(loss, weight_VD)[0]

    whole = weight_gradient()
    monkeypatch.setattr("headrace.training.loss._HEAD_ROWS", 7)
    torch.testing.assert_close(weight_gradient(), whole, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("chunk", [4, 64])
def test_token_losses(chunk: int) -> None:
    hidden_TD, weight_VD, bias_V, labels_T = example(24)
    head = Head(weight_VD, bias_V, softcap=5.0)
    losses_BL = token_losses(hidden_TD.view(3, 8, 8), head, labels_T.view(3, 8), chunk=chunk)
    expected_T = F.cross_entropy(whole_logits(hidden_TD, head), labels_T, reduction="none", ignore_index=-100)
    assert not losses_BL.requires_grad
    torch.testing.assert_close(losses_BL, expected_T.detach().view(3, 8), rtol=1e-12, atol=1e-12)


class Allocations(TorchDispatchMode):
    """Every output's element count and the peak of the bytes of new storages alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self._held = 0
        self._alive: set[int] = set()
        self._references: list[weakref.ref] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for x in tensors(result):
            self.largest = max(self.largest, x.numel())
            if x.untyped_storage().data_ptr() not in given | self._alive:
                self._follow(x.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()

        def freed(reference: weakref.ref) -> None:
            self._alive.discard(address)
            self._held -= nbytes

        self._alive.add(address)
        self._held += nbytes
        self.peak = max(self.peak, self._held)
        self._references.append(weakref.ref(storage, freed))


def tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("chunk", [32, 100, 400])
def test_allocations_are_as_announced(
    dtype: torch.dtype, softcap: float | None, train_head: bool, chunk: int
) -> None:
    tokens, width, vocabulary = 400, 16, 2000
    hidden_TD, weight_VD, _, labels_T = example(tokens, width, vocabulary, dtype, ignored=0)
    head = Head(weight_VD.requires_grad_(train_head), softcap=softcap)
    with Allocations() as seen:
        loss = chunked_cross_entropy(hidden_TD, head, labels_T, scale=0.01, chunk=chunk)
        loss.backward()
    announced = loss_bytes(
        tokens, vocabulary, width, chunk, dtype, softcap=softcap is not None, train_head=train_head
    )
    assert seen.largest == max(chunk * vocabulary, tokens * width, vocabulary * width)
    # The rest are vectors of a few bytes a token.
    assert announced <= seen.peak <= announced + 64 * tokens


def test_evaluation_holds_one_chunk_and_no_gradient() -> None:
    hidden_TD, weight_VD, _, labels_T = example(400, 16, 2000, torch.float32, ignored=0)
    with torch.no_grad(), Allocations() as seen:
        chunked_cross_entropy(hidden_TD, Head(weight_VD), labels_T, scale=0.01, chunk=50)
    assert 50 * 2000 * 4 <= seen.peak <= 50 * (2000 + 16) * 4 + 64 * 400
