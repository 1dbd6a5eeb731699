"""Gathers the gradients of backward into parcels: one a bucket and micro-batch."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.schedule.layout import Layout


class Arrived:
    """A gradient on the device, until every bucket that holds a part of it has copied its part.

    Attributes:
        nbytes: bytes that autograd allocated for it.
    """

    __slots__ = ("_flat", "_parts", "_rows", "nbytes")

    def __init__(self, gradient: Tensor, parts: int) -> None:
        self._flat: Tensor | None = None
        self._rows: tuple[Tensor, Tensor] | None = None  # numbers [U], rising, and rows [U, D]
        if gradient.layout is torch.sparse_coo:
            summed = gradient.detach().coalesce()
            self._rows = summed.indices()[0], summed.values()
            self.nbytes = self._rows[1].nbytes
        else:
            self._flat = gradient.detach().reshape(-1)
            self.nbytes = self._flat.nbytes
        self._parts = parts

    def part(self, start: int, stop: int) -> Tensor:
        """Elements ``start:stop`` of the gradient, 1-D; of a sparse one, rows that it lacks are zeros."""
        if self._flat is not None:
            return self._flat[start:stop]
        assert self._rows is not None
        ids_U, rows_UD = self._rows
        width = rows_UD.shape[1]
        first, last = start // width, -(-stop // width)
        low, high = (int(n) for n in torch.searchsorted(ids_U, ids_U.new_tensor([first, last])))
        dense = rows_UD.new_zeros(last - first, width)
        dense[ids_U[low:high] - first] = rows_UD[low:high]
        return dense.view(-1)[start - first * width : stop - first * width]

    def copied(self) -> int:
        """Count one part as copied; returns the bytes that this set free."""
        self._parts -= 1
        if self._parts:
            return 0
        self._flat = self._rows = None
        return self.nbytes


@dataclass
class Parcel:
    """Gradients of one micro-batch that leave together, and which of them begin their parameter's sum."""

    arrived: dict[int, Arrived]
    first: frozenset[int]


@dataclass
class _Tray:
    waiting: dict[int, Arrived] = field(default_factory=dict)  # of the micro-batch under way
    parcels: list[frozenset[int]] = field(default_factory=list)  # their parameters, by micro-batch
    seen: set[int] = field(default_factory=set)  # parameters with a gradient in this step


class Collector:
    """Sorts arriving gradients into the buckets of a layout.

    A bucket's parcel is complete when all its parameters have arrived, or when one of them arrives again,
    which means that the next micro-batch has begun; :meth:`flush` completes the rest.

    Attributes:
        arrived: parameters with a gradient in this step, in these buckets or not.
    """

    def __init__(self, layout: Layout) -> None:
        self._homes = [[index for index, _ in layout.places(i)] for i in range(len(layout.parameters))]
        self._sizes = [len(bucket.segments) for bucket in layout.buckets]
        self._trays = [_Tray() for _ in layout.buckets]
        self.parcels: dict[tuple[int, int], Parcel] = {}
        self.arrived: set[int] = set()

    def arrive(self, parameter: int, gradient: Tensor) -> tuple[Arrived, list[tuple[int, int]]]:
        """Take a gradient; returns it and the (micro-batch, bucket) of every parcel that became complete."""
        self.arrived.add(parameter)
        arrived = Arrived(gradient, len(self._homes[parameter]))
        complete = []
        for index in self._homes[parameter]:
            tray = self._trays[index]
            if parameter in tray.waiting:
                complete.append(self._close(index))
            tray.waiting[parameter] = arrived
            if len(tray.waiting) == self._sizes[index]:
                complete.append(self._close(index))
        return arrived, complete

    def flush(self) -> Iterator[tuple[int, int]]:
        """Complete every parcel that still waits for a parameter."""
        for index, tray in enumerate(self._trays):
            if tray.waiting:
                yield self._close(index)

    def seen(self, bucket: int, microbatch: int | None = None) -> Set[int]:
        """Parameters of a bucket that have a gradient in this step, or in one of its micro-batches."""
        tray = self._trays[bucket]
        return tray.seen if microbatch is None else tray.parcels[microbatch]

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived in this step."""
        return not self.arrived

    def next_step(self) -> None:
        """Forget the step; its parcels must have been taken."""
        assert not self.parcels, list(self.parcels)
        self._trays = [_Tray() for _ in self._trays]
        self.arrived.clear()

    def _close(self, index: int) -> tuple[int, int]:
        tray = self._trays[index]
        key = (len(tray.parcels), index)
        self.parcels[key] = Parcel(tray.waiting, frozenset(tray.waiting.keys() - tray.seen))
        tray.parcels.append(frozenset(tray.waiting))
        tray.seen |= tray.waiting.keys()
        tray.waiting = {}
        return key
