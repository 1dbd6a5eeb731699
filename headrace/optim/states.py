"""Where master weights and moments live: all in memory, or on the disk behind a window of memory."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from weakref import WeakMethod

import torch
from torch import Tensor

from headrace.memory.blocks import ALIGN
from headrace.memory.disk import SUFFIX, DiskStore
from headrace.memory.parts import Form, read_part
from headrace.memory.pool import HostPool
from headrace.schedule.layout import Bucket, Layout
from headrace.schedule.window import Window

Tables = dict[str, Tensor]
"""State tables of one bucket: name -> fp32, 1-D, ``bucket.size`` elements or more."""

Fill = Callable[[str, str, int, int, Tensor], None]
"""``fill(table, name, start, stop, target)`` puts elements of a parameter's table into a 1-D tensor."""

Files = Sequence[Path]
"""What :meth:`DiskStates.save` makes of states."""


class States(ABC):
    """State tables of every bucket.

    Attributes:
        names: of the tables.
    """

    names: tuple[str, ...]

    @abstractmethod
    def tables(self, bucket: Bucket, place: int | None) -> Tables:
        """The tables of a bucket that is in memory, in this place if it has one."""

    @abstractmethod
    def visit(self, buckets: Iterable[Bucket], *, write: bool) -> Iterator[tuple[Bucket, Tables]]:
        """Each bucket in turn, in memory while it is visited; nothing may be on its way meanwhile.

        Args:
            write: whether the visitor changes it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class RamStates(States):
    """All states in memory.

    Args:
        layout: the buckets.
        names: of the tables.
        pool: hands out the memory.
    """

    def __init__(self, layout: Layout, names: Sequence[str], pool: HostPool) -> None:
        self.names = tuple(names)
        self._pool = pool
        self._buckets: list[Tables] = []
        for bucket in layout.buckets:
            self._buckets.append({})
            for name in names:
                what = f"{name} of bucket {bucket.index}"
                self._buckets[-1][name] = pool.take(bucket.size, torch.float32, "states", what)

    def tables(self, bucket: Bucket, place: int | None) -> Tables:
        """See :class:`States`."""
        assert place is None
        return self._buckets[bucket.index]

    def visit(self, buckets: Iterable[Bucket], *, write: bool) -> Iterator[tuple[Bucket, Tables]]:
        """See :class:`States`."""
        for bucket in buckets:
            yield bucket, self._buckets[bucket.index]

    def close(self) -> None:
        """See :class:`States`."""
        while self._buckets:
            for table in self._buckets.pop().values():
                self._pool.give_back(table)


class DiskStates(States):
    """States on the disk, and some buckets of them in memory.

    Args:
        layout: the buckets.
        names: of the tables.
        pool: hands out the memory of the window.
        disk: keeps the rest.
        places: buckets in memory at once.
        kept: how many checkpoints will hold states beside the living ones, for which space is claimed.
        rank: of those that save into one checkpoint, a part of the files' names; None for one alone.

    Attributes:
        drain: lets everything that its owner has on the way arrive.
    """

    def __init__(
        self,
        layout: Layout,
        names: Sequence[str],
        pool: HostPool,
        disk: DiskStore,
        *,
        places: int,
        kept: int,
        rank: int | None = None,
    ) -> None:
        self.names = tuple(names)
        self.disk = disk
        self.window = Window(places, len(layout.buckets))
        self.drain: WeakMethod[Callable[[], None]] | None = None
        self._pool = pool
        self._layout = layout
        self._kind = "states" if rank is None else f"states-r{rank}"
        self._known: set[int] = set()  # buckets that have content
        largest = max((bucket.size for bucket in layout.buckets), default=0)
        self._places: list[Tables] = []
        for place in range(self.window.places):
            self._places.append({})
            for name in names:
                size = whole_blocks(largest)
                what = f"{name} in place {place} of the window (update.window)"
                self._places[-1][name] = pool.take(size, torch.float32, "states", what)
        for bucket in layout.buckets:
            form = Form(dict.fromkeys(names, torch.float32), bucket.size, self._notes(bucket))
            disk.declare(self._name(bucket), form, bucket.index)
        disk.reserve(1 + kept, "states", "the states and the checkpoints of them")

    def tables(self, bucket: Bucket, place: int | None) -> Tables:
        """See :class:`States`."""
        return self.at(place)

    def at(self, place: int | None) -> Tables:
        """The tables in a place of the window."""
        assert place is not None
        return self._places[place]

    def visit(self, buckets: Iterable[Bucket], *, write: bool) -> Iterator[tuple[Bucket, Tables]]:
        """See :class:`States`; what was changed is on the disk, or dirty in memory, afterwards."""
        self._drain()
        for bucket in buckets:
            stays = self.window.place(bucket.index) is not None
            if not stays:
                self._enter(bucket)
            yield bucket, self.at(self.window.place(bucket.index))
            self._known.add(bucket.index)
            if write:
                self.flush_one(bucket)
            if not stays:
                self.window.drop(bucket.index)

    def flush(self) -> None:
        """Write every bucket that is newer in memory than on the disk."""
        self._drain()
        for index in self.window.resident:
            if self.window.is_dirty(index):
                self.flush_one(self._layout.buckets[index])

    def flush_one(self, bucket: Bucket) -> None:
        """Write a bucket that is in memory and stays there."""
        for path in range(len(self.disk.paths)):
            self.write(bucket, path, self.at(self.window.place(bucket.index)))
        self.window.cleaned(bucket.index)

    def save(self, directory: Path) -> list[Path]:
        """Put every bucket's files into a directory, linked where possible: states as they are now."""
        self.flush()
        return [
            file for bucket in self._layout.buckets for file in self.disk.link(self._name(bucket), directory)
        ]

    def adopt(self, files: Sequence[Path]) -> bool:
        """Take saved files as the states, linked where possible; false where they are divided otherwise."""
        found: dict[str, dict[int, Path]] = {}
        for file in files:
            name, _, index = file.name.removesuffix(SUFFIX).rpartition(".p")
            found.setdefault(name, {})[int(index)] = file
        buckets = self._layout.buckets
        if not files or not all(self._fits(bucket, found.get(self._name(bucket), {})) for bucket in buckets):
            return False
        self._drain()
        for bucket in buckets:
            for path, file in found[self._name(bucket)].items():
                self.disk.adopt(self._name(bucket), path, file)
            self._known.add(bucket.index)
            if self.window.place(bucket.index) is not None:
                self.window.cleaned(bucket.index)
                self.window.drop(bucket.index)
        return True

    def _fits(self, bucket: Bucket, parts: dict[int, Path]) -> bool:
        """Whether files hold a bucket as it is cut here, each on a path that there is."""
        form = self.disk.form(self._name(bucket))
        found = [read_part(parts[index])[0] for index in sorted(parts)]
        bounds = [0, *(part.high for part in found)]
        whole = all(part.form == form and part.low == low for part, low in zip(found, bounds, strict=False))
        return whole and bounds[-1] == bucket.size and all(index < len(self.disk.paths) for index in parts)

    def read(self, bucket: Bucket, path: int, tables: Tables) -> int:
        """Read a bucket's part from a path; returns its bytes."""
        return self.disk.read(self._name(bucket), path, tables)

    def write(self, bucket: Bucket, path: int, tables: Tables) -> int:
        """Write a bucket's part to a path; returns its bytes."""
        return self.disk.write(self._name(bucket), path, tables)

    def close(self) -> None:
        """See :class:`States`."""
        while self._places:
            for table in self._places.pop().values():
                self._pool.give_back(table)

    def _drain(self) -> None:
        """Let everything that is on its way arrive."""
        if self.drain is not None and (drain := self.drain()) is not None:
            drain()

    def _enter(self, bucket: Bucket) -> None:
        """Bring a bucket into memory, in the place of another one if need be."""
        window = self.window
        if len(window.resident) == window.places:
            leaving = self._layout.buckets[window.resident[0]]
            if window.is_dirty(leaving.index):
                self.flush_one(leaving)
            window.drop(leaving.index)
        tables = self._places[window.enter(bucket.index)]
        if bucket.index in self._known:
            for path in range(len(self.disk.paths)):
                self.read(bucket, path, tables)
        else:
            for table in tables.values():
                table.zero_()

    def _name(self, bucket: Bucket) -> str:
        return f"{self._kind}-b{bucket.index:05}"

    def _notes(self, bucket: Bucket) -> dict[str, str]:
        """Which elements of which parameters the bucket holds, for whoever reads its file later."""
        names = [parameter.name for parameter in self._layout.parameters]
        places = [[names[s.parameter], s.start, s.stop, s.offset] for s in bucket.segments]
        return {"segments": json.dumps(places, separators=(",", ":"))}


def whole_blocks(numel: int) -> int:
    """Elements of fp32 that fill whole blocks of the disk and hold ``numel``."""
    unit = ALIGN // torch.float32.itemsize
    return -(-numel // unit) * unit
