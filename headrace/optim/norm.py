"""The global gradient norm, independent of how the parameters were cut.

Sums of squares in fp64 over fixed blocks of 64 Ki elements counted from each tensor's start, added in
parameter and block order. torch's own norm differs by its fp32 rounding, within 1e-6.
"""

import math
from collections.abc import Set
from dataclasses import dataclass

import torch

from headrace.optim import kernel
from headrace.optim.ranks import Ranks
from headrace.schedule.layout import Layout, Segment


@dataclass(frozen=True, slots=True)
class Norm:
    """What the global norm says about a step.

    Attributes:
        value: the norm before clipping.
        coefficient: the factor on every gradient, 1.0 for none.
        offender: the first parameter with a gradient that is not finite, if any.
    """

    value: float
    coefficient: float
    offender: str | None

    @property
    def finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.value)


NO_NORM = Norm(0.0, 1.0, None)


class NormSums:
    """The blocks' sums of one step.

    Args:
        layout: says which blocks there are.
    """

    def __init__(self, layout: Layout) -> None:
        self._names = [parameter.name for parameter in layout.parameters]
        self._blocks = [
            [b for s in bucket.segments for b in kernel.blocks_of(s)] for bucket in layout.buckets
        ]
        self._sums: list[dict[int, float]] = [{} for _ in layout.parameters]

    def blocks(self, bucket: int, active: Set[int], worker: int, workers: int) -> list[Segment]:
        """A worker's share of the blocks of the active parameters of a bucket."""
        return [b for b in self._blocks[bucket] if b.parameter in active][worker::workers]

    def add(self, blocks: list[Segment], gradient: torch.Tensor, scratch: torch.Tensor) -> None:
        """Sum the given blocks of a bucket's gradient."""
        for block, value in zip(blocks, kernel.block_sums(gradient, blocks, scratch), strict=True):
            self._sums[block.parameter][block.start] = value

    def finish(self, limit: float, ranks: Ranks | None = None) -> Norm:
        """The norm of all that was added, and the clip coefficient for ``limit`` (0: never clip).

        What was added is forgotten then. The coefficient is that of ``torch.nn.utils.clip_grad_norm_``:
        limit / (norm + 1e-6), at most 1. Where ``ranks`` share the buckets, what all of them added counts.
        """
        if ranks is not None:
            ranks.gather(self._sums)
        total, offender = 0.0, None
        for name, sums in zip(self._names, self._sums, strict=True):
            for start in sorted(sums):
                total += sums[start]
            if offender is None and not math.isfinite(total):
                offender = name
        self.clear()
        value = math.sqrt(total) if total == total else math.nan
        coefficient = min(1.0, limit / (value + 1e-6)) if limit and math.isfinite(value) else 1.0
        return Norm(value, coefficient, offender)

    def clear(self) -> None:
        """Forget what was added."""
        for sums in self._sums:
            sums.clear()
