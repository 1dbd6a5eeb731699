"""Which buckets of states are in memory while the rest lie on the disk. Pure decisions: no tensor, no file.

Every step walks the buckets in the other direction than the step before, and leaves the last ones in memory:
the next step begins with them (Maurya et al. 2025, MLP-Offload, cache-friendly order). So of n buckets n - c
are read and written in a step, where c are left.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WINDOW = 4
"""Default buckets of states in host memory where states live on the disk."""

BUFFERS = 3
"""Buffers in host memory of gradients that wait on the disk: one is read, one worked on, one written."""

AHEAD = 3
"""Places that are not left filled: for a bucket that is read, one that is updated, one that is written."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read ``bucket`` into ``place``, after the (bucket, step) that is written from there, if one is."""

    bucket: int
    place: int
    after: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Update:
    """Update ``bucket`` in its place; ``read`` says whether its read was planned in this step."""

    bucket: int
    place: int
    read: bool


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``bucket`` back; its place is free afterwards."""

    bucket: int
    place: int


Move = Read | Update | Write


class Window:
    """The places in memory, and what lies in them.

    Args:
        places: buckets that fit into memory at once.
        buckets: how many there are.
    """

    def __init__(self, places: int, buckets: int) -> None:
        assert places >= 1 and buckets >= 0, (places, buckets)
        self.places = min(places, buckets)
        self.kept = self.places if places >= buckets else max(0, self.places - AHEAD)
        self.rising = True
        self._place: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._read: set[int] = set()  # in this step
        self._free = deque(range(self.places))
        self._writes: dict[int, tuple[int, int]] = {}  # place -> (bucket, step) written from there

    def ordered(self, buckets: Sequence[int]) -> list[int]:
        """The buckets in the direction of this step."""
        return sorted(buckets, reverse=not self.rising)

    def place(self, bucket: int) -> int | None:
        """Where a bucket lies in memory, if it does."""
        return self._place.get(bucket)

    @property
    def resident(self) -> list[int]:
        """Buckets in memory."""
        return list(self._place)

    def is_dirty(self, bucket: int) -> bool:
        """Whether memory holds something newer than the disk."""
        return bucket in self._dirty

    def ahead(self, order: Sequence[int]) -> Iterator[Read]:
        """Reads that can begin before the step's gradients are known: of the first that are missing."""
        for bucket in order:
            if bucket not in self._place and self._free:
                yield self._take(bucket)

    def step(self, order: Sequence[int], step: int) -> Iterator[Move]:
        """Every move of a step over ``order``; what was planned by :meth:`ahead` is not read again."""
        yield from self._make_room(order, step)
        left = len(order) - self.kept
        for position, bucket in enumerate(order):
            if bucket not in self._place:
                yield self._take(bucket)
            yield Update(bucket, self._place[bucket], bucket in self._read)
            self._dirty.add(bucket)
            if position < left:
                yield self.leave(bucket, step)
        self.rising = not self.rising
        self._read.clear()

    def leave(self, bucket: int, step: int) -> Write:
        """Write a bucket and free its place."""
        place = self._place.pop(bucket)
        self._dirty.discard(bucket)
        self._free.append(place)
        self._writes[place] = bucket, step
        return Write(bucket, place)

    def drop(self, bucket: int) -> None:
        """Free the place of a bucket that the disk holds as it is."""
        assert bucket not in self._dirty, bucket
        self._free.append(self._place.pop(bucket))

    def cleaned(self, bucket: int) -> None:
        """Note that a bucket was written and stays."""
        self._dirty.discard(bucket)

    def enter(self, bucket: int) -> int:
        """Give a bucket a place that is free, outside of any step."""
        return self._take(bucket).place

    def _take(self, bucket: int) -> Read:
        place = self._free.popleft()
        self._place[bucket] = place
        self._read.add(bucket)
        return Read(bucket, place, self._writes.pop(place, None))

    def _make_room(self, order: Sequence[int], step: int) -> Iterator[Write]:
        """Free places of buckets that come late in the step, or not at all, for those that are missing."""
        missing = sum(bucket not in self._place for bucket in order)
        wanted = min(missing, self.places - self.kept)
        first = next((i for i, bucket in enumerate(order) if bucket not in self._place), len(order))
        given_back = min(first, len(order) - self.kept)  # by those that the step begins with
        position = {bucket: index for index, bucket in enumerate(order)}
        late = [bucket for bucket in self._place if position.get(bucket, len(order)) > first]
        for bucket in sorted(late, key=lambda bucket: position.get(bucket, len(order)), reverse=True):
            if bucket in position and len(self._free) + given_back >= wanted:
                return
            if bucket in self._dirty:
                yield self.leave(bucket, step)
            else:
                self.drop(bucket)
