"""State tables of a checkpoint, read by parameter: from a file a table, or from a disk store's blocks."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.memory.parts import Part, read_part
from headrace.memory.tensorfile import Entry, TensorFile

SUFFIX = ".safetensors"


class SavedTables(ABC):
    """What a checkpoint holds of every parameter."""

    @abstractmethod
    def tables(self) -> list[str]:
        """Names of the tables."""

    @abstractmethod
    def place(self, table: str) -> Path:
        """What messages name."""

    @abstractmethod
    def forms(self, table: str) -> dict[str, str]:
        """Parameter -> its dtype and shape, for comparison and messages."""

    @abstractmethod
    def form(self, entry: Entry) -> str:
        """How :meth:`forms` describes an entry."""

    @abstractmethod
    def read(self, table: str, name: str, start: int, target: Tensor) -> None:
        """Fill a 1-D tensor with a parameter's elements from ``start`` on, cast to its dtype."""


class TableFiles(SavedTables):
    """A safetensors file for each table, with whole parameters."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._names = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]

    def tables(self) -> list[str]:
        """See :class:`SavedTables`."""
        return self._names

    def place(self, table: str) -> Path:
        """See :class:`SavedTables`."""
        return self._path / f"{table}{SUFFIX}"

    def forms(self, table: str) -> dict[str, str]:
        """See :class:`SavedTables`."""
        with self._open(table) as file:
            return {name: f"{info.dtype} {info.shape}" for name, info in file.entries.items()}

    def form(self, entry: Entry) -> str:
        """See :class:`SavedTables`."""
        return f"{entry.dtype} {entry.shape}"

    def read(self, table: str, name: str, start: int, target: Tensor) -> None:
        """See :class:`SavedTables`."""
        with self._open(table) as file:
            if name not in file.entries:
                raise UserError(f"{file.path} holds no {name}; it is of another model")
            file.read_range(name, start, target)

    def _open(self, table: str) -> TensorFile:
        return TensorFile(self.place(table))


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements ``start:stop`` of a parameter, at element ``offset`` of a file's tables."""

    file: Path
    start: int
    stop: int
    offset: int


class BlockFiles(SavedTables):
    """Files of a disk store: a bucket's part each, with all tables."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self.files = [path / name for name in names]

    @cached_property
    def _parts(self) -> dict[Path, Part]:
        return {file: read_part(file)[0] for file in self.files}

    @cached_property
    def _runs(self) -> dict[str, list[_Run]]:
        """Parameter -> where its elements lie, in order."""
        found: dict[str, list[_Run]] = {}
        for file, part in self._parts.items():
            for name, start, stop, offset in json.loads(part.form.notes["segments"]):
                low, high = max(offset, part.low), min(offset + stop - start, part.high)
                if low < high:
                    run = _Run(file, start + low - offset, start + high - offset, low - part.low)
                    found.setdefault(name, []).append(run)
                elif start == stop:
                    found.setdefault(name, [])
        return {name: sorted(runs, key=lambda run: run.start) for name, runs in found.items()}

    def tables(self) -> list[str]:
        """See :class:`SavedTables`."""
        return list(next(iter(self._parts.values())).form.tables)

    def place(self, table: str) -> Path:
        """See :class:`SavedTables`."""
        return self._path

    def forms(self, table: str) -> dict[str, str]:
        """See :class:`SavedTables`; a flat part knows numbers of elements alone."""
        sums = {name: sum(run.stop - run.start for run in runs) for name, runs in self._runs.items()}
        return {name: _elements(numel) for name, numel in sums.items()}

    def form(self, entry: Entry) -> str:
        """See :class:`SavedTables`."""
        return _elements(entry.nbytes // entry.dtype.itemsize)

    def read(self, table: str, name: str, start: int, target: Tensor) -> None:
        """See :class:`SavedTables`."""
        stop = start + target.numel()
        for run in self._runs[name]:
            low, high = max(start, run.start), min(stop, run.stop)
            if low < high:
                with TensorFile(run.file) as file:
                    file.read_range(table, run.offset + low - run.start, target[low - start : high - start])


def _elements(numel: int) -> str:
    return f"{torch.float32} of {numel:,} elements"
