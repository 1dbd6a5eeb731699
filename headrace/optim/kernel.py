"""The one-pass kernels over a bucket: AdamW with casts in cache-sized chunks, and the sums for the norm.

Each is called once per worker, on one OpenMP thread, with the worker's own static range.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw as functional_adamw

from headrace.optim.layout import ALIGN, BLOCK, Bucket, Segment

CHUNK = 2**18
"""Elements of a chunk: a gradient in fp32 (1 MiB) stays in the cache between the cast and the update."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """AdamW's numbers for one param group in one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class BucketTensors:
    """The flat tensors of one bucket, all of ``bucket.size`` elements.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32 and updated in place; ``gradient`` is in the training
    dtype or fp32; ``weight`` receives the new weights in the training dtype.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    weight: Tensor


def share(size: int, worker: int, workers: int) -> tuple[int, int]:
    """The static range of ``size`` elements that belongs to a worker; its bounds are multiples of 16."""
    units = -(-size // ALIGN)
    low, high = units * worker // workers, units * (worker + 1) // workers
    return min(size, low * ALIGN), min(size, high * ALIGN)


def adamw(
    bucket: Bucket,
    tensors: BucketTensors,
    span: tuple[int, int],
    counts: dict[int, Tensor],
    hyper: Hyper,
    coefficient: float,
    scratch: Tensor,
) -> None:
    """Update elements ``span`` of a bucket: scale the gradient, AdamW in fp32, round the new weights.

    Equals ``torch.optim.AdamW(fused=True)`` on fp32 tensors bit for bit, since it calls the same kernel with
    the same boundaries (AdamW: Loshchilov and Hutter 2019, algorithm 2).

    Args:
        counts: parameter index -> its count of updates, this one included, as a 0-dim fp32 tensor.
            Parameters that are missing take no part in this step.
        coefficient: the factor on the gradient, 1.0 for none.
        scratch: fp32, at least ``CHUNK`` elements; belongs to the calling worker.
    """
    for low in range(*span, CHUNK):
        high = min(low + CHUNK, span[1])
        segments = [s for s in bucket.within(low, high) if s.parameter in counts]
        if not segments:
            continue
        gradient = _scaled(tensors.gradient[low:high], coefficient, scratch[: high - low])
        _fused_adamw(
            _views(tensors.master, segments),
            [gradient[s.offset - low : s.end - low] for s in segments],
            _views(tensors.exp_avg, segments),
            _views(tensors.exp_avg_sq, segments),
            [counts[s.parameter] for s in segments],
            hyper,
        )
        tensors.weight[low:high].copy_(tensors.master[low:high])


def _scaled(gradient: Tensor, coefficient: float, scratch: Tensor) -> Tensor:
    """The gradient in fp32 times the coefficient; the product of 16-bit numbers must be taken in fp32."""
    if gradient.dtype == torch.float32:
        return gradient if coefficient == 1.0 else torch.mul(gradient, coefficient, out=scratch)
    scratch.copy_(gradient)
    return scratch if coefficient == 1.0 else scratch.mul_(coefficient)


def block_sums(gradient: Tensor, blocks: Sequence[Segment], scratch: Tensor) -> list[float]:
    """The sum of squares of each block of a bucket's gradient, in fp64.

    Args:
        scratch: fp64, at least ``BLOCK`` elements; belongs to the calling worker.
    """
    sums = []
    for block in blocks:
        values = scratch[: block.numel].copy_(gradient[block.offset : block.end])
        sums.append(float(torch.dot(values, values)))
    return sums


def blocks_of(segment: Segment) -> list[Segment]:
    """A segment's blocks of 64 Ki elements, counted from the start of its tensor."""
    ends = range(segment.offset, segment.end, BLOCK)
    parts = (segment.clipped(low, low + BLOCK) for low in ends)
    return [part for part in parts if part]


def _views(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    return [flat[s.offset : s.end] for s in segments]


Fused = Callable[[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], Hyper], None]


def _fused_private(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: list[Tensor],
    hyper: Hyper,
) -> None:
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        counts,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )


def _fused_public(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: list[Tensor],
    hyper: Hyper,
) -> None:
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count - 1 for count in counts],  # the public function counts the update itself
        fused=True,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )


# The private function has a tenth of the public one's overhead, which matters on cache-sized chunks.
_fused_adamw: Fused = _fused_private if hasattr(torch, "_fused_adamw_") else _fused_public
