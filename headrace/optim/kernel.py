"""The one-pass kernels over a bucket: AdamW with casts in cache-sized chunks, and the sums for the norm.

Each is called once per worker, on one OpenMP thread, with the worker's own static range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.optim.loops import LOOPS
from headrace.schedule.layout import ALIGN, BLOCK, Bucket, Segment

CHUNK = 2**15
"""Elements of a chunk: its weights, moments and fp32 gradient (512 KiB) stay in a core's cache meanwhile."""


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
    dtype or fp32; ``weight`` receives the new weights in the training dtype, and may be ``gradient`` itself.
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
    segments = [s for s in bucket.within(*span) if s.parameter in counts]
    with torch.inference_mode():  # views of every chunk, without autograd's accounts of them
        LOOPS.update(
            tensors.master,
            tensors.exp_avg,
            tensors.exp_avg_sq,
            tensors.gradient,
            tensors.weight,
            [s.offset for s in segments],
            [s.end for s in segments],
            [counts[s.parameter] for s in segments],
            coefficient,
            scratch,
            hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.weight_decay,
            hyper.eps,
        )


def block_sums(gradient: Tensor, blocks: Sequence[Segment], scratch: Tensor) -> list[float]:
    """The sum of squares of each block of a bucket's gradient, in fp64.

    Args:
        scratch: fp64, at least ``BLOCK`` elements; belongs to the calling worker.
    """
    return LOOPS.squares(gradient, [b.offset for b in blocks], [b.end for b in blocks], scratch)


def blocks_of(segment: Segment) -> list[Segment]:
    """A segment's blocks of 64 Ki elements, counted from the start of its tensor."""
    ends = range(segment.offset, segment.end, BLOCK)
    parts = (segment.clipped(low, low + BLOCK) for low in ends)
    return [part for part in parts if part]
