"""The kernels' loops over chunks, in the part of Python that TorchScript understands.

TorchScript needs no compiler and runs without Python's lock. Workers that run Python wait for that lock at
every call, and waking a thread takes tens of microseconds. The same code as plain Python gives the same bits.
"""

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as functional_adamw

_HAS_PRIVATE = hasattr(torch, "_fused_adamw_")


class Loops(NamedTuple):
    """``update`` and ``squares`` below, scripted or not."""

    update: Callable[..., None]
    squares: Callable[..., list[float]]


def update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    weight: Tensor,
    starts: list[int],
    stops: list[int],
    counts: list[Tensor],
    coefficient: float,
    scratch: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """AdamW over elements ``starts[i]:stops[i]`` of a bucket for each i, in chunks as long as ``scratch``."""
    chunk = scratch.numel()
    for index in range(len(starts)):
        low, high = starts[index], stops[index]
        masters = master[low:high].split(chunk)  # fewer calls than a slice at a time
        firsts, seconds = exp_avg[low:high].split(chunk), exp_avg_sq[low:high].split(chunk)
        gradients, weights = gradient[low:high].split(chunk), weight[low:high].split(chunk)
        for number in range(len(masters)):
            grad = gradients[number]
            if grad.dtype != torch.float32:
                grad = scratch[: grad.numel()].copy_(grad)
                if coefficient != 1.0:  # the product of 16-bit numbers must be taken in fp32
                    grad.mul_(coefficient)
            elif coefficient != 1.0:
                grad = torch.mul(grad, coefficient, out=scratch[: grad.numel()])
            params = [masters[number]]
            fused_adamw(
                params,
                [grad],
                [firsts[number]],
                [seconds[number]],
                [counts[index]],
                lr,
                beta1,
                beta2,
                weight_decay,
                eps,
            )
            # Read through the list: TorchScript drops a call whose results it takes for unused.
            weights[number].copy_(params[0])


def squares(gradient: Tensor, starts: list[int], stops: list[int], scratch: Tensor) -> list[float]:
    """The sum of squares of elements ``starts[i]:stops[i]`` for every i, in the dtype of ``scratch``."""
    sums: list[float] = []
    for index in range(len(starts)):
        values = scratch[: stops[index] - starts[index]].copy_(gradient[starts[index] : stops[index]])
        sums.append(float(torch.dot(values, values).item()))
    return sums


def _fused_private(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        counts,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def _fused_public(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count - 1 for count in counts],  # the public function counts the update itself
        fused=True,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# The private function has a tenth of the public one's overhead, which matters on cache-sized chunks.
fused_adamw = _fused_private if _HAS_PRIVATE else _fused_public

PLAIN = Loops(update, squares)


def _scripted() -> Loops:
    """The loops as TorchScript where this torch and this Python have it, else as plain Python."""
    if not _HAS_PRIVATE or sys.version_info >= (3, 14):  # TorchScript ends with Python 3.13
        return PLAIN
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return Loops(torch.jit.script(update), torch.jit.script(squares))
    except (AttributeError, RuntimeError, OSError):  # a torch without TorchScript, or no source beside it
        return PLAIN


LOOPS = _scripted()
