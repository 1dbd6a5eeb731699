"""Ranks that hold the same weights and share the work of one optimizer: each updates its own buckets.

States and gradients are divided, weights are not (the stages 1 and 2 of ZeRO: Rajbhandari et al. 2020,
section 5). The ranks are given the same gradients, already summed by whoever trains.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import UserError
from headrace.memory.weights import DTYPES
from headrace.optim.weights import WorkingWeights
from headrace.schedule.layout import BLOCK, Layout


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each bucket: in order, always the one that has the fewest elements so far."""
    held, found = [0] * ranks, []
    for size in sizes:
        found.append(min(range(ranks), key=lambda rank: (held[rank], rank)))
        held[found[-1]] += size
    return found


class Ranks:
    """This rank among those that share an optimizer.

    Every method is called by all ranks at the same point. A rank that dies lets the others end with the error
    of the process group, after its time-out.

    Args:
        layout: all buckets, the same on every rank.
        group: the ranks.

    Attributes:
        own: this rank's buckets alone, numbered anew.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._layout = layout
        self._owners = owners([bucket.size for bucket in layout.buckets], self.size)
        mine = [b for b in layout.buckets if self._owners[b.index] == self.rank]
        self.own = Layout(layout.parameters, tuple(replace(b, index=i) for i, b in enumerate(mine)))
        starts = [0, *itertools.accumulate(-(-p.numel // BLOCK) for p in layout.parameters)]
        self._first, self._blocks = starts[:-1], starts[-1]
        self._on_host = dist.get_backend(group) == "gloo"

    def gather(self, sums: Sequence[dict[int, float]]) -> None:
        """Complete the sums of squares of blocks, by parameter and start, with those of the other ranks.

        Each is taken on one rank and zero on the others, so their sum is exact.
        """
        table = torch.zeros(self._blocks, dtype=torch.float64)
        for first, found in zip(self._first, sums, strict=True):
            for start, value in found.items():
                table[first + start // BLOCK] = value
        table = self._reduced(table, dist.ReduceOp.SUM)
        for first, found, p in zip(self._first, sums, self._layout.parameters, strict=True):
            found.update({start: table[first + start // BLOCK].item() for start in range(0, p.numel, BLOCK)})

    def check_same(self, seen: Sequence[bool]) -> None:
        """Raise UserError unless all ranks have gradients of the same parameters.

        Args:
            seen: whether each parameter has one here.
        """
        mine = torch.tensor([float(flag) for flag in seen])
        differ = (self._reduced(mine.clone(), dist.ReduceOp.SUM) % self.size).nonzero()
        if len(differ):
            name = self._layout.parameters[int(differ[0])].name
            raise UserError(
                f"{name} has a gradient on some ranks and none on others: give all {self.size} ranks of the "
                "group the same gradients, such as their mean by all_reduce"
            )

    def share_weights(self, weights: WorkingWeights) -> None:
        """Bring every bucket's weights from the rank that has updated them to all others."""
        for bucket in self._layout.buckets:
            with weights.visited(bucket, write=True) as segments:
                buffer = torch.empty(bucket.size, dtype=DTYPES[bucket.dtype])
                if self._owners[bucket.index] == self.rank:
                    for s, weight in zip(bucket.segments, segments, strict=True):
                        buffer[s.offset : s.end].copy_(weight)
                buffer = self._broadcast(buffer, self._owners[bucket.index])
                if self._owners[bucket.index] != self.rank:
                    for s, weight in zip(bucket.segments, segments, strict=True):
                        weight.copy_(buffer[s.offset : s.end])

    def pieces(self, parameter: int, mine: Sequence[Tensor]) -> list[Tensor]:
        """All pieces of a parameter's state, in element order.

        Args:
            parameter: its number.
            mine: those of this rank's buckets, in element order.
        """
        left, found = iter(mine), []
        for index, s in self._layout.places(parameter):
            owner = self._owners[index]
            piece = next(left).contiguous() if owner == self.rank else torch.empty(s.numel)
            found.append(self._broadcast(piece, owner))
        return found

    def _reduced(self, table: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        table = table if self._on_host else table.cuda()
        dist.all_reduce(table, how, group=self.group)
        return table.cpu()

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        tensor = tensor if self._on_host else tensor.cuda()
        dist.broadcast(tensor, group=self.group, group_src=owner)
        return tensor.cpu()
