"""Cuts parameters into flat buckets. Pure integers: no tensor is touched here.

Every tensor starts at a multiple of 16 elements, and a tensor that is cut over several buckets is cut at
multiples of 64 Ki elements counted from its start. torch's fused AdamW computes the last ``numel % 16``
elements of a tensor with other instructions, and the gradient norm sums blocks of 64 Ki elements; with these
boundaries neither can tell how the tensors were cut.

Tensors that are streamed come in units: what one part of the model needs at a time. A bucket holds tensors of
one unit, and these begin on whole blocks of the disk, so that a unit's buckets, read one behind the other,
give every tensor in one piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.schedule.action import Unit

ALIGN = 16
BLOCK = 2**16

STREAMED = 2**11
"""Alignment of streamed tensors: 4 KiB of a 16-bit dtype."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the layout knows of a parameter.

    Attributes:
        name: as its model calls it.
        numel: its elements.
        group: its param group.
        dtype: the name of its dtype.
        unit: what it is streamed with; None if it stays on the device.
    """

    name: str
    numel: int
    group: int
    dtype: str
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start:stop`` of a parameter, at ``offset`` in their bucket."""

    parameter: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the segment."""
        return self.stop - self.start

    @property
    def end(self) -> int:
        """Where it ends in the bucket."""
        return self.offset + self.numel

    def clipped(self, low: int, high: int) -> "Segment | None":
        """The part that lies in elements ``low:high`` of the bucket, if any."""
        first, last = max(low, self.offset), min(high, self.end)
        if first >= last:
            return None
        return Segment(
            self.parameter, self.start + first - self.offset, self.start + last - self.offset, first
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat run of segments of one param group, dtype and unit; ``size`` includes gaps between tensors."""

    index: int
    group: int
    dtype: str
    segments: tuple[Segment, ...]
    size: int
    unit: Unit | None = None

    def within(self, low: int, high: int) -> Iterator[Segment]:
        """The segments clipped to elements ``low:high`` of the bucket."""
        for segment in self.segments:
            if part := segment.clipped(low, high):
                yield part


@dataclass(frozen=True)
class Layout:
    """All parameters, and the buckets they were cut into."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]

    def places(self, parameter: int) -> list[tuple[int, Segment]]:
        """(bucket index, segment) of a parameter, in element order."""
        return self._places[parameter]

    @cached_property
    def _places(self) -> list[list[tuple[int, Segment]]]:
        found: list[list[tuple[int, Segment]]] = [[] for _ in self.parameters]
        for bucket in self.buckets:
            for segment in bucket.segments:
                found[segment.parameter].append((bucket.index, segment))
        return [sorted(places, key=lambda place: place[1].start) for places in found]

    @property
    def size(self) -> int:
        """Elements of all buckets, gaps included."""
        return sum(bucket.size for bucket in self.buckets)

    def size_of(self, dtype: str) -> int:
        """Elements of all buckets of one dtype, gaps included."""
        return sum(bucket.size for bucket in self.buckets if bucket.dtype == dtype)

    def of_unit(self, unit: Unit) -> list[Bucket]:
        """The buckets of a unit, in the order in which they lie in its memory."""
        return [bucket for bucket in self.buckets if bucket.unit == unit]


def padded(numel: int, alignment: int = ALIGN) -> int:
    """``numel`` rounded up to the alignment of tensors in a bucket."""
    return -(-numel // alignment) * alignment


def cut(parameters: Sequence[Parameter], capacity: int) -> Layout:
    """Cut parameters into buckets of at most ``capacity`` elements, last parameter first.

    Backward finishes the last parameters first, so the first buckets are complete early. A bucket holds one
    param group, one dtype and one unit.
    """
    assert capacity > 0 and capacity % BLOCK == 0, capacity
    filling: dict[_Key, _Filling] = {}
    done: list[Bucket] = []

    def close(key: _Key) -> None:
        done.append(filling.pop(key).close(len(done), key))

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        own = (parameter.group, parameter.dtype, parameter.unit)
        if parameter.unit is not None:
            for key in [key for key in filling if key[2] not in (None, parameter.unit)]:
                close(key)
        start = 0
        while start < parameter.numel:
            bucket = filling.setdefault(own, _Filling(capacity, STREAMED if parameter.unit else ALIGN))
            taken = bucket.take(index, start, parameter.numel)
            start += taken
            if not taken:
                close(own)
    for key in list(filling):
        close(key)
    return Layout(tuple(parameters), tuple(done))


def extended(given: Layout, parameters: Sequence[Parameter], capacity: int) -> Layout:
    """A layout of ``parameters`` that has the buckets of another one, and cuts what that does not know.

    Args:
        given: its parameters are among them, those of each bucket in one param group.
        parameters: all.
        capacity: elements of a new bucket.
    """
    known = {parameter.name: index for index, parameter in enumerate(given.parameters)}
    places = {known[parameter.name]: i for i, parameter in enumerate(parameters) if parameter.name in known}
    assert len(places) == len(known), known.keys() - {parameter.name for parameter in parameters}
    buckets = []
    for bucket in given.buckets:
        segments = tuple(replace(s, parameter=places[s.parameter]) for s in bucket.segments)
        groups = {parameters[s.parameter].group for s in segments}
        assert len(groups) == 1, (bucket.unit, groups)
        buckets.append(replace(bucket, group=groups.pop(), segments=segments))
    others = [i for i, parameter in enumerate(parameters) if parameter.name not in known]
    for bucket in cut([parameters[i] for i in others], capacity).buckets:
        segments = tuple(replace(s, parameter=others[s.parameter]) for s in bucket.segments)
        buckets.append(replace(bucket, index=len(buckets), segments=segments))
    return Layout(tuple(parameters), tuple(buckets))


_Key = tuple[int, str, Unit | None]


class _Filling:
    def __init__(self, capacity: int, alignment: int) -> None:
        self._capacity = capacity
        self._alignment = alignment
        self._segments: list[Segment] = []
        self._used = 0

    def take(self, parameter: int, start: int, numel: int) -> int:
        """Take what fits of elements ``start:numel``, in whole blocks unless all of it fits."""
        room = self._capacity - self._used
        wanted = numel - start
        taken = wanted if wanted <= room else room // BLOCK * BLOCK
        if taken:
            self._segments.append(Segment(parameter, start, start + taken, self._used))
            self._used += padded(taken, self._alignment)
        return taken

    def close(self, index: int, key: _Key) -> Bucket:
        group, dtype, unit = key
        return Bucket(index, group, dtype, tuple(self._segments), self._used, unit)
