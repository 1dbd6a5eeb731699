"""Chunked linear cross-entropy: the loss and both gradients of the head, without the whole logits.

Liger's fused linear cross-entropy (Hsu et al. 2024) in plain torch: per chunk of tokens the logits are
computed, turned in place into their own gradient, and multiplied into the gradients of the hidden states and
of the head. Nothing is recomputed in the backward.

Shapes: B sequences, L positions, T = B * L tokens, N the tokens of one chunk, D width, V vocabulary,
P the chunk's tokens and what fills them up to a length that repeats.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.data.batch import IGNORED
from headrace.memory.shapes import round_length

_HEAD_ROWS = 16384  # rows of a 16-bit head's gradient computed at a time: bounds the 16-bit temporary


@dataclass(frozen=True)
class Head:
    """The output layer: logits are ``scale * (x @ weight.T + bias)``, capped where the model caps them.

    Attributes:
        weight_VD: bf16, fp32 or fp64.
        bias_V: added to the product, or None.
        scale: multiplies the logits (Cohere; Granite has its inverse).
        softcap: ``softcap * tanh(logits / softcap)`` (Gemma 2), or None.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def chunked_cross_entropy(hidden: Tensor, head: Head, labels: Tensor, *, scale: float, chunk: int) -> Tensor:
    """The summed cross-entropy of all labels but -100, times ``scale``.

    Softmax, loss and sums of gradients are computed in fp32 (fp64 for an fp64 head). The logits of a bf16
    head are those of a bf16 matrix product, as in every mixed-precision loop. Equal calls give equal bits.

    Args:
        hidden: [B, L, D] or [T, D], what the head is applied to.
        head: the output layer; a frozen weight or bias gets no gradient, at no cost.
        labels: [B, L] or [T], the token to predict *at* each position (already shifted), -100: none. Tokens
            without a label cost nothing.
        scale: one over the trained tokens of the whole optimizer step.
        chunk: tokens whose logits exist at a time.

    Returns:
        An fp32 scalar (fp64 for an fp64 head), exactly 0 when no label is trained.
    """
    hidden_TD, labels_T = _flat(hidden, head, labels)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden_TD, head.weight_VD, head.bias_V, labels_T, head, scale, chunk)
    return _total((losses_N1 for _, losses_N1 in _losses(hidden_TD, labels_T, head, chunk)), scale, head)


@torch.no_grad()
def token_losses(hidden: Tensor, head: Head, labels: Tensor, *, chunk: int) -> Tensor:
    """The cross-entropy of every token, in the shape of ``labels``: fp32 (fp64), 0 where the label is -100.

    For evaluation by document: nothing is scaled and no gradient is computed. Arguments as in
    :func:`chunked_cross_entropy`.
    """
    hidden_TD, labels_T = _flat(hidden, head, labels)
    result_T = torch.zeros(labels_T.shape, dtype=_wide(head.weight_VD.dtype), device=hidden.device)
    for index_N, losses_N1 in _losses(hidden_TD, labels_T, head, chunk):
        result_T.index_copy_(0, index_N, losses_N1.squeeze(1))
    return result_T.view(labels.shape)


def _flat(hidden: Tensor, head: Head, labels: Tensor) -> tuple[Tensor, Tensor]:
    assert hidden.shape[:-1] == labels.shape, (hidden.shape, labels.shape)
    return hidden.flatten(0, -2).to(head.weight_VD.dtype), labels.flatten()


def loss_bytes(
    tokens: int,
    vocabulary: int,
    width: int,
    chunk: int,
    dtype: torch.dtype,
    *,
    softcap: bool = False,
    train_head: bool = True,
) -> int:
    """Highest bytes that one training call allocates, the gradients it returns included.

    Vectors (of one chunk, or of a bias) are left out.

    Args:
        tokens: tokens of the micro-batch, trained or not.
        vocabulary: rows of the head.
        width: columns of the head.
        chunk: as in :func:`chunked_cross_entropy`.
        dtype: of hidden states and head.
        softcap: whether the logits are capped.
        train_head: whether the head's weight gets a gradient.
    """
    rows, narrow, wide = min(chunk, tokens), dtype.itemsize, _wide(dtype).itemsize
    mixed = narrow < wide
    logits = rows * vocabulary * (wide * (2 if softcap else 1) + (narrow if mixed else 0))
    gathered = 2 * rows * width * narrow  # a chunk's hidden states and their gradient
    hidden_gradient = tokens * width * narrow
    if not train_head:
        return hidden_gradient + logits + gathered
    if tokens <= chunk or not mixed:
        return hidden_gradient + logits + gathered + vocabulary * width * narrow
    product, rounded = (n * width * narrow for n in (min(_HEAD_ROWS, vocabulary), vocabulary))
    return hidden_gradient + vocabulary * width * wide + max(logits + gathered + product, rounded)


class _LinearCrossEntropy(torch.autograd.Function):
    # Autograd tracks arguments that are tensors: weight and bias stand beside the head that holds them.
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        head: Head,
        scale: float,
        chunk: int,
    ) -> Tensor:
        sums = _Gradients(hidden_TD, head, chunk, ctx.needs_input_grad[:3])
        loss = _accumulate(sums, hidden_TD, labels_T, head, scale, chunk)
        ctx.gradients = sums.rounded()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were already handed out; run its forward again")
        if grad_output != 1:
            gradients = [None if gradient is None else gradient.mul_(grad_output) for gradient in gradients]
        return (*gradients, None, None, None, None)


def _accumulate(
    sums: "_Gradients", hidden_TD: Tensor, labels_T: Tensor, head: Head, scale: float, chunk: int
) -> Tensor:
    logits = _Logits(head, min(chunk, len(labels_T)), trained=True)
    losses = []
    for index_N in _trained(labels_T, chunk):
        x_PD, labels_P1 = _gathered(hidden_TD, labels_T, index_N, chunk)
        losses.append(logits.losses(x_PD, labels_P1)[: len(index_N)])
        sums.add(index_N, x_PD, *logits.gradient(labels_P1, scale))
    return _total(losses, scale, head)


def _losses(hidden_TD: Tensor, labels_T: Tensor, head: Head, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    logits = _Logits(head, min(chunk, len(labels_T)), trained=False)
    for index_N in _trained(labels_T, chunk):
        yield index_N, logits.losses(*_gathered(hidden_TD, labels_T, index_N, chunk))[: len(index_N)]


def _gathered(hidden_TD: Tensor, labels_T: Tensor, index_N: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Hidden states [P, D] and labels [P, 1] of a chunk's tokens, and zeros up to a length that repeats."""
    rows, count = min(round_length(len(index_N)), chunk, len(labels_T)), len(index_N)
    x_PD, labels_P1 = hidden_TD.new_zeros(rows, hidden_TD.shape[1]), labels_T.new_zeros(rows, 1)
    torch.index_select(hidden_TD.detach(), 0, index_N, out=x_PD[:count])
    torch.index_select(labels_T, 0, index_N, out=labels_P1[:count, 0])
    return x_PD, labels_P1


def _trained(labels_T: Tensor, chunk: int) -> Sequence[Tensor]:
    assert chunk >= 1, chunk
    index_T = (labels_T != IGNORED).nonzero().squeeze(1)
    return index_T.split(chunk) if len(index_T) else ()


def _total(losses: Iterable[Tensor], scale: float, head: Head) -> Tensor:
    # In fp64 because the sum of a long step's losses grows while its terms stay small.
    total = torch.zeros((), dtype=torch.float64, device=head.weight_VD.device)
    for losses_N1 in losses:
        total += losses_N1.sum(dtype=torch.float64)
    return (total * scale).to(_wide(head.weight_VD.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Logits:
    """The logits of one chunk: one wide buffer, changed in place from logits to exponentials to gradient.

    A 16-bit head has a second, narrow buffer, the operand of its matrix products; a soft cap has a third, its
    slope at each logit.
    """

    def __init__(self, head: Head, rows: int, *, trained: bool) -> None:
        weight_VD, shape = head.weight_VD, (rows, len(head.weight_VD))
        self._head = head
        self._wide = weight_VD.new_empty(shape, dtype=_wide(weight_VD.dtype))
        self._same = self._wide.dtype == weight_VD.dtype
        self._narrow = self._wide if self._same else weight_VD.new_empty(shape)
        self._slope = torch.empty_like(self._wide) if trained and head.softcap else None
        self._sums_N1 = self._wide.new_empty((0, 1))

    def losses(self, x_ND: Tensor, labels_N1: Tensor) -> Tensor:
        """The loss [N, 1] of each token; leaves the exponentials for :meth:`gradient`."""
        z_NV = self._compute(x_ND)
        highest_N1, target_N1 = z_NV.amax(1, keepdim=True), z_NV.gather(1, labels_N1)
        self._sums_N1 = z_NV.sub_(highest_N1).exp_().sum(1, keepdim=True)
        return self._sums_N1.log() + (highest_N1 - target_N1)

    def gradient(self, labels_N1: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The gradient of ``scale`` times the losses just computed, [N, V]: wide, and as the head's dtype."""
        z_NV, narrow_NV = self._wide[: len(labels_N1)], self._narrow[: len(labels_N1)]
        z_NV.mul_(scale / self._sums_N1)
        z_NV.scatter_(1, labels_N1, z_NV.gather(1, labels_N1) - scale)
        if self._slope is not None:
            z_NV.mul_(self._slope[: len(labels_N1)])
        if self._head.scale != 1:
            z_NV.mul_(self._head.scale)
        return z_NV, z_NV if self._same else narrow_NV.copy_(z_NV)

    def _compute(self, x_ND: Tensor) -> Tensor:
        head, z_NV, narrow_NV = self._head, self._wide[: len(x_ND)], self._narrow[: len(x_ND)]
        torch.mm(x_ND, head.weight_VD.T, out=narrow_NV)
        if not self._same:
            z_NV.copy_(narrow_NV)
        if head.bias_V is not None:
            z_NV.add_(head.bias_V)
        if head.scale != 1:
            z_NV.mul_(head.scale)
        if head.softcap is not None:
            self._cap(z_NV, head.softcap)
        return z_NV

    def _cap(self, z_NV: Tensor, softcap: float) -> None:
        z_NV.div_(softcap).tanh_()
        if self._slope is not None:
            torch.mul(z_NV, z_NV, out=self._slope[: len(z_NV)]).neg_().add_(1)
        z_NV.mul_(softcap)


class _Gradients:
    """The gradients of hidden states, weight and bias, summed over chunks; None where not needed.

    The weight's are summed in fp32 even for a 16-bit head, except when one chunk holds every token.
    """

    def __init__(self, hidden_TD: Tensor, head: Head, chunk: int, needed: tuple[bool, bool, bool]) -> None:
        wide = _wide(head.weight_VD.dtype)
        sums = head.weight_VD.dtype if len(hidden_TD) <= chunk else wide
        self._head = head
        self._hidden_TD = torch.zeros_like(hidden_TD) if needed[0] else None
        self._weight_VD = torch.zeros_like(head.weight_VD, dtype=sums) if needed[1] else None
        self._bias_V = (
            torch.zeros_like(head.bias_V, dtype=wide) if head.bias_V is not None and needed[2] else None
        )

    def add(self, index_N: Tensor, x_PD: Tensor, wide_PV: Tensor, narrow_PV: Tensor) -> None:
        """Add a chunk: its tokens' places and hidden states, the gradient of its logits in both dtypes.

        Rows beyond the tokens belong to none; their hidden states are zero.
        """
        count = len(index_N)
        if self._hidden_TD is not None:
            self._hidden_TD.index_copy_(0, index_N, (narrow_PV @ self._head.weight_VD)[:count])
        if self._weight_VD is not None:
            _add_product(self._weight_VD, narrow_PV, x_PD)
        if self._bias_V is not None:
            self._bias_V += wide_PV[:count].sum(0)

    def rounded(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three sums in the dtypes of what they are gradients of; they are handed over, not kept."""
        weight_VD, self._weight_VD = self._weight_VD, None
        if weight_VD is not None:
            weight_VD = weight_VD.to(self._head.weight_VD.dtype)
        if self._bias_V is not None and self._head.bias_V is not None:
            self._bias_V = self._bias_V.to(self._head.bias_V.dtype)
        return self._hidden_TD, weight_VD, self._bias_V


def _add_product(sums_VD: Tensor, gradient_NV: Tensor, x_ND: Tensor) -> None:
    if sums_VD.dtype == gradient_NV.dtype:
        sums_VD.addmm_(gradient_NV.T, x_ND)
        return
    for rows_RD, part_NR in zip(sums_VD.split(_HEAD_ROWS), gradient_NV.split(_HEAD_ROWS, 1), strict=True):
        rows_RD += part_NR.T @ x_ND
