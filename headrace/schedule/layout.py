"""Cuts parameters into flat buckets. Pure integers: no tensor is touched here.

Every tensor starts at a multiple of 16 elements, and a tensor that is cut over several buckets is cut at
multiples of 64 Ki elements counted from its start. torch's fused AdamW computes the last ``numel % 16``
elements of a tensor with other instructions, and the gradient norm sums blocks of 64 Ki elements; with these
boundaries neither can tell how the tensors were cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN = 16
BLOCK = 2**16


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the layout knows of a parameter: its name, elements, param group, and dtype name."""

    name: str
    numel: int
    group: int
    dtype: str


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
    """A flat run of segments of one param group and dtype; ``size`` includes the gaps between tensors."""

    index: int
    group: int
    dtype: str
    segments: tuple[Segment, ...]
    size: int

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


def padded(numel: int) -> int:
    """``numel`` rounded up to the alignment of tensors in a bucket."""
    return -(-numel // ALIGN) * ALIGN


def cut(parameters: Sequence[Parameter], capacity: int) -> Layout:
    """Cut parameters into buckets of at most ``capacity`` elements, last parameter first.

    Backward finishes the last parameters first, so the first buckets are complete early. A bucket holds one
    param group and one dtype.
    """
    assert capacity > 0 and capacity % BLOCK == 0, capacity
    filling: dict[tuple[int, str], _Filling] = {}
    done: list[Bucket] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        start = 0
        while start < parameter.numel:
            key = (parameter.group, parameter.dtype)
            bucket = filling.setdefault(key, _Filling(capacity))
            taken = bucket.take(index, start, parameter.numel)
            start += taken
            if not taken:
                done.append(filling.pop(key).close(len(done), key))
    for key in list(filling):
        done.append(filling.pop(key).close(len(done), key))
    return Layout(tuple(parameters), tuple(done))


class _Filling:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._segments: list[Segment] = []
        self._used = 0

    def take(self, parameter: int, start: int, numel: int) -> int:
        """Take what fits of elements ``start:numel``, in whole blocks unless all of it fits."""
        room = self._capacity - self._used
        wanted = numel - start
        taken = wanted if wanted <= room else room // BLOCK * BLOCK
        if taken:
            self._segments.append(Segment(parameter, start, start + taken, self._used))
            self._used += padded(taken)
        return taken

    def close(self, index: int, key: tuple[int, str]) -> Bucket:
        return Bucket(index, *key, tuple(self._segments), self._used)
