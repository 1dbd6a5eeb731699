"""The loss over a head that comes by rows: neither its weights nor its logits are ever there as a whole.

Two passes over the rows: the first finds each token's logarithm of the sum of exponentials, piece by piece
(Milakov and Gimelshein 2018, online normaliser), the second the gradients. Each piece of rows sees all tokens
at once, so the gradient of these rows is complete and needs no sums in fp32.

Shapes: B sequences, L positions, T = B * L tokens, N those with a label, R rows of a piece, D width,
V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.data.batch import IGNORED
from headrace.training.loss import Head

Pieces = Callable[[], Iterator[tuple[int, Tensor]]]
"""All rows of the head in turn: the number of the first, and [R, D]."""


def row_cross_entropy(
    hidden: Tensor, head: Head, pieces: Pieces, labels: Tensor, *, scale: float, chunk: int
) -> Tensor:
    """The summed cross-entropy as :func:`~headrace.training.loss.chunked_cross_entropy` computes it.

    It differs from that by rounding: sums over the vocabulary have another order.

    Args:
        hidden: [B, L, D] or [T, D].
        head: its weight has its shape, and takes the gradient; its values come from ``pieces``.
        pieces: gives the rows.
        labels: [B, L] or [T], -100 for none.
        scale: one over the trained tokens of the whole optimizer step.
        chunk: logits of so many tokens times the vocabulary may exist at a time.
    """
    hidden_TD, labels_T = hidden.flatten(0, -2).to(head.weight_VD.dtype), labels.flatten()
    return _RowCrossEntropy.apply(
        hidden_TD, head.weight_VD, head.bias_V, labels_T, head, pieces, scale, chunk
    )


class _RowCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        head: Head,
        pieces: Pieces,
        scale: float,
        chunk: int,
    ) -> Tensor:
        passes = _Passes(hidden_TD, labels_T, head, pieces, chunk)
        losses_N1 = passes.losses()
        ctx.gradients = (
            passes.gradients(scale, ctx.needs_input_grad[:3]) if any(ctx.needs_input_grad) else None
        )
        return (losses_N1.sum(dtype=torch.float64) * scale).to(losses_N1.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were already handed out; run its forward again")
        if grad_output != 1:
            gradients = [None if gradient is None else gradient.mul_(grad_output) for gradient in gradients]
        return (*gradients, None, None, None, None, None)


class _Passes:
    def __init__(self, hidden_TD: Tensor, labels_T: Tensor, head: Head, pieces: Pieces, chunk: int) -> None:
        self._index_N = (labels_T != IGNORED).nonzero().squeeze(1)
        self._hidden_TD = hidden_TD.detach()
        self._x_ND = self._hidden_TD[self._index_N]
        self._labels_N1 = labels_T[self._index_N][:, None]
        self._head = head
        self._pieces = pieces
        self._rows = max(1, chunk * len(head.weight_VD) // max(1, len(self._index_N)))
        wide = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        self._highest_N1 = hidden_TD.new_full((len(self._index_N), 1), -torch.inf, dtype=wide)
        self._sums_N1 = torch.zeros_like(self._highest_N1)

    def losses(self) -> Tensor:
        """The loss [N, 1] of each token with a label."""
        target_N1 = torch.zeros_like(self._sums_N1)
        for first, rows_RD in self._cut():
            z_NR = self._logits(first, rows_RD)
            highest_N1 = torch.maximum(self._highest_N1, z_NR.amax(1, keepdim=True))
            self._sums_N1.mul_((self._highest_N1 - highest_N1).exp_())
            places_N1, here_N1 = self._places(first, len(rows_RD))
            target_N1 += torch.where(here_N1, z_NR.gather(1, places_N1), 0)
            self._sums_N1 += z_NR.sub_(highest_N1).exp_().sum(1, keepdim=True)
            self._highest_N1 = highest_N1
            del z_NR  # before the next are made
        return self._sums_N1.log() + (self._highest_N1 - target_N1)

    def gradients(self, scale: float, needed: tuple[bool, bool, bool]) -> list[Tensor | None]:
        """Of ``scale`` times the summed losses: hidden states, weight and bias; None where not needed."""
        head, x_ND = self._head, self._x_ND
        hidden_ND = torch.zeros_like(x_ND, dtype=self._sums_N1.dtype)
        weight_VD = (
            torch.empty(head.weight_VD.shape, dtype=x_ND.dtype, device=x_ND.device) if needed[1] else None
        )
        bias_V = None if head.bias_V is None or not needed[2] else torch.empty_like(head.bias_V)
        for first, rows_RD in self._cut():
            z_NR = self._slopes(first, rows_RD, scale)
            narrow_NR = z_NR.to(x_ND.dtype)
            if needed[0]:
                hidden_ND += narrow_NR @ rows_RD
            if weight_VD is not None:
                torch.mm(narrow_NR.T, x_ND, out=weight_VD[first : first + len(rows_RD)])
            if bias_V is not None:
                bias_V[first : first + len(rows_RD)] = z_NR.sum(0)
            del z_NR, narrow_NR
        if not needed[0]:
            return [None, weight_VD, bias_V]
        hidden_TD = torch.zeros_like(self._hidden_TD)
        return [hidden_TD.index_copy_(0, self._index_N, hidden_ND.to(x_ND.dtype)), weight_VD, bias_V]

    def _cut(self) -> Iterator[tuple[int, Tensor]]:
        for first, rows_RD in self._pieces():
            for start in range(0, len(rows_RD), self._rows):
                yield first + start, rows_RD[start : start + self._rows]

    def _places(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Each label's place among the rows, and whether it is there."""
        places_N1 = self._labels_N1 - first
        here_N1 = (places_N1 >= 0) & (places_N1 < count)
        return places_N1.clamp(0, count - 1), here_N1

    def _logits(self, first: int, rows_RD: Tensor) -> Tensor:
        head = self._head
        z_NR = (self._x_ND @ rows_RD.T).to(self._sums_N1.dtype)
        if head.bias_V is not None:
            z_NR += head.bias_V.detach()[first : first + len(rows_RD)]
        if head.scale != 1:
            z_NR *= head.scale
        return z_NR if head.softcap is None else z_NR.div_(head.softcap).tanh_().mul_(head.softcap)

    def _slopes(self, first: int, rows_RD: Tensor, scale: float) -> Tensor:
        """The gradient [N, R] of ``scale`` times the losses with respect to x @ rows.T."""
        head, z_NR = self._head, self._logits(first, rows_RD)
        slope_NR = None if head.softcap is None else 1 - (z_NR / head.softcap) ** 2
        z_NR = z_NR.sub_(self._highest_N1).exp_().mul_(scale / self._sums_N1)
        places_N1, here_N1 = self._places(first, len(rows_RD))
        z_NR.scatter_add_(1, places_N1, here_N1.to(z_NR.dtype).mul_(-scale))
        if slope_NR is not None:
            z_NR *= slope_NR
        return z_NR if head.scale == 1 else z_NR.mul_(head.scale)
