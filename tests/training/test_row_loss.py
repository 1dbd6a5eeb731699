"""The loss by rows against torch's cross-entropy over whole logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from headrace.training.loss import Head
from headrace.training.row_loss import row_cross_entropy


def reference(hidden, weight, bias, labels, scale, logit_scale, softcap):
    logits = linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum") * scale


def pieces_of(weight, sizes):
    def pieces():
        start, turn = 0, 0
        while start < len(weight):
            size = sizes[turn % len(sizes)]
            yield start, weight.detach()[start : start + size]
            start, turn = start + size, turn + 1

    return pieces


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 30),
    vocabulary=st.integers(2, 50),
    width=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    chunk=st.integers(1, 8),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    logit_scale=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_torchs(
    tokens, vocabulary, width, sizes, chunk, biased, softcap, logit_scale, seed
):
    """In fp64, where rounding is far below what is compared."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight = draw(1, tokens, width).requires_grad_(), (3 * draw(vocabulary, width)).requires_grad_()
    bias = draw(vocabulary).requires_grad_() if biased else None
    labels = torch.randint(-1, vocabulary, (1, tokens), generator=generator)
    labels[labels < 0] = -100
    trained = [hidden, weight, *([bias] if biased else [])]
    expected = reference(hidden, weight, bias, labels, 0.3, logit_scale, softcap)
    head = Head(weight, bias, logit_scale, softcap)
    found = row_cross_entropy(hidden, head, pieces_of(weight, sizes), labels, scale=0.3, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(found, trained), torch.autograd.grad(expected, trained), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_narrow_dtypes_are_near_the_wide_one(dtype, tolerance):
    """bf16 rounds each logit to 8 bits, as the loss over the whole head does."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 40, 16).to(dtype), torch.randn(300, 16).to(dtype)
    labels = torch.randint(300, (1, 40))
    hidden.requires_grad_(), weight.requires_grad_()
    found = row_cross_entropy(hidden, Head(weight), pieces_of(weight, [64]), labels, scale=1 / 40, chunk=8)
    ours = torch.autograd.grad(found, [hidden, weight])
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = reference(*wide, None, labels, 1 / 40, 1.0, None)
    theirs = torch.autograd.grad(expected, wide)
    assert abs(found.item() - expected.item()) < tolerance * expected.item()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).norm() < tolerance * b.norm()


def test_equal_calls_give_equal_bits_and_nothing_trained_gives_zero():
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 9, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)

    def gradients(labels):
        loss = row_cross_entropy(hidden, Head(weight), pieces_of(weight, [7]), labels, scale=1.0, chunk=4)
        return loss, torch.autograd.grad(loss, [hidden, weight])

    labels = torch.randint(30, (1, 9))
    assert all(map(torch.equal, gradients(labels)[1], gradients(labels)[1]))
    none, zeros = gradients(torch.full((1, 9), -100))
    assert none.item() == 0.0 and not any(g.any() for g in zeros)
