"""Named buffers on one or more disk paths: each buffer is divided over all of them by their speeds.

A buffer's part on a path is one file. It is overwritten in place while nobody else has a link to it; a
checkpoint links to it, and then the next write makes a new file. So a checkpoint costs no copy, and what it
holds never changes. Dividing by speed: Maurya et al. 2025 (MLP-Offload), section on multiple paths.
"""

import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from headrace.config import format_size, parse_size
from headrace.errors import RunStopped, UserError, reason
from headrace.lanes.workers import Workers
from headrace.machine.paths import split
from headrace.memory.blocks import GO_ON, BlockFile, Watch, allocate
from headrace.memory.budget import Budget
from headrace.memory.disk_speed import turn_speed
from headrace.memory.durable import DISK_FULL
from headrace.memory.links import link_or_copy
from headrace.memory.lock import DirectoryLock, Turn
from headrace.memory.parts import Form, Part, read_part
from headrace.memory.speeds import PathSpeeds
from headrace.memory.transfer import Transfer

SUFFIX = ".safetensors"

TRANSFERS = 4
"""Threads of one direction of one path: one waits for the disk while others sum and hand over."""

_RESERVE = "reserved-space"


@dataclass(frozen=True)
class DiskPath:
    """A directory for buffers.

    Attributes:
        path: created if missing; one run at a time.
        size: bytes that may be taken there; None for what is free.
        speed: bytes a second that it reads and writes in turn; None to measure it at the start.
    """

    path: Path
    size: int | None = None
    speed: float | None = None


def disk_paths(given: Mapping[str, int | str | None] | Sequence[DiskPath]) -> list[DiskPath]:
    """The paths of a mapping from directories to budgets, ``{"/nvme/headrace": "120GiB"}``, or as given.

    Raises UserError for what is neither.
    """
    if isinstance(given, list | tuple) and all(isinstance(path, DiskPath) for path in given):
        return list(given)
    if not isinstance(given, Mapping):
        raise UserError(f'disk={given!r} must be directories with their budgets, like {{"/nvme": "120GiB"}}')
    return [DiskPath(Path(p), None if size is None else parse_size(size)) for p, size in given.items()]


class DiskStore:
    """Buffers of one rank on disk paths, within their budgets.

    Args:
        paths: where the buffers lie.
        budget: of the disk tier, where their bytes are booked.
        rank: number of this process among those that share the paths; a part of the files' names.
        watch: finds reads and writes that never end.
        shared: whether other ranks use the paths too: then one of them at a time moves bytes of one path in
            one direction (Maurya et al. 2025, MLP-Offload, node-level exclusive access).

    Raises:
        UserError: a path that is missing and cannot be made, cannot be written to, or is another run's.
    """

    def __init__(
        self,
        paths: Sequence[DiskPath],
        budget: Budget,
        rank: int = 0,
        watch: Watch | None = None,
        *,
        shared: bool = False,
    ) -> None:
        assert paths
        self.paths = [replace(path, path=path.path.expanduser().absolute()) for path in paths]
        self.watch = watch or Watch()
        self.speeds = PathSpeeds([path.path for path in self.paths], [1.0] * len(paths))
        self._budget = budget
        self._booked: list[tuple[str, int]] = []
        self._new: list[str] = []  # declared, but without claimed space
        self._teams: dict[tuple[str, int], Workers] = {}
        self._turns = {
            (way, index): Turn(path.path / f".headrace-turn-{way}" if shared else None)
            for index, path in enumerate(self.paths)
            for way in ("read", "write")
        }
        self._prefix = f"headrace-r{rank}-"
        self._forms: dict[str, Form] = {}
        self._numbers: dict[str, int] = {}
        self._parts: dict[tuple[str, int], Part] = {}
        self._rounds: dict[str, tuple[list[float], set[int]]] = {}  # shares of the newest, paths that know it
        self._rounds_lock = threading.Lock()
        self._reserved = [0] * len(paths)
        self._resources = ExitStack()
        try:
            for path in self.paths:
                self._resources.enter_context(DirectoryLock(path.path, f".{self._prefix}lock", "memory.disk"))
                self._check_writable(path.path)
                self._clean(path.path)
            if len(paths) > 1:
                start = [path.speed or turn_speed(path.path) for path in self.paths]
                self.speeds = PathSpeeds([path.path for path in self.paths], start)
        except BaseException:
            self._resources.close()
            raise

    def declare(self, name: str, form: Form, number: int = 0) -> None:
        """Announce a buffer; it has no content yet.

        Args:
            name: of its files.
            form: what it is made of.
            number: among buffers of its kind: what is left by whole units goes to other paths each time.
        """
        assert name not in self._forms, name
        self._numbers[name] = number
        self._forms[name] = form
        self._new.append(name)

    def form(self, name: str) -> Form:
        """The form of a declared buffer."""
        return self._forms[name]

    def reserve(self, copies: int, purpose: str, what: str) -> None:
        """Claim the space of ``copies`` of every buffer declared since, on the disk at once where it can be.

        The budget counts the living ones; the others are links that checkpoints hold.

        Args:
            copies: of each, with itself.
            purpose: of the buffers, in the ledger.
            what: names them in a refusal.

        Raises:
            UserError: a budget or a disk has no room for its share.
        """
        more = [copies * self._share(self._new, index) for index in range(len(self.paths))]
        wanted = [had + new for had, new in zip(self._reserved, more, strict=True)]
        for path, nbytes in zip(self.paths, wanted, strict=True):
            free = shutil.disk_usage(path.path).free + self._taken(path.path)
            if path.size is not None and nbytes > path.size:
                raise UserError(
                    f"{what} needs {format_size(nbytes)} in {path.path}, where memory.disk allows "
                    f"{format_size(path.size)}: raise it to at least {nbytes:,}, or name another path"
                )
            if nbytes > free:
                raise UserError(
                    f"{what} needs {format_size(nbytes)} in {path.path}, where {format_size(free)} are free: "
                    "make room, or name another path in memory.disk"
                )
        living = sum(self._forms[name].nbytes for name in self._new)
        self._budget.reserve(purpose, living, what)
        self._booked.append((purpose, living))
        self._reserved = wanted
        self._new.clear()
        self.top_up(())

    def read(self, name: str, index: int, tables: Mapping[str, Tensor]) -> int:
        """Read a buffer's part on path ``index`` into memory; returns its bytes.

        Raises:
            RunStopped: the file is not as it was written, or the disk fails.
        """
        with self._turns["read", index]:
            transfer = self.reading(name, index, tables)
            if transfer is None:
                return 0
            team, start = self._team("read", index), time.perf_counter()
            try:
                team.run(lambda worker: transfer.read(worker, team.count))
            finally:
                transfer.close()
            return self._moved(index, "read", transfer, start)

    def write(self, name: str, index: int, tables: Mapping[str, Tensor]) -> int:
        """Write a buffer's part on path ``index``; returns its bytes.

        Raises:
            RunStopped: the disk is full, or fails.
        """
        with self._turns["write", index]:
            transfer = self.writing(name, index, tables)
            if transfer is None:
                return 0
            team, start = self._team("write", index), time.perf_counter()
            try:
                team.run(lambda worker: transfer.write(worker, team.count))
            except BaseException:
                transfer.close()
                raise
            self.written(name, index, transfer.finish())
            return self._moved(index, "write", transfer, start)

    def top_up(self, checkpoints: Iterable[Path]) -> None:
        """Claim again what became free: to be called after checkpoints were written and removed.

        Args:
            checkpoints: directories that may hold links to buffers.
        """
        checkpoints = list(checkpoints)
        for index, path in enumerate(self.paths):
            wanted = self._reserved[index] - self._held(path.path, checkpoints)
            self._set_reserve(path.path, max(0, wanted))

    def writing(self, name: str, index: int, tables: Mapping[str, Tensor]) -> Transfer | None:
        """Begin to write a buffer's part on path ``index``; None where the path takes none of it."""
        part = self._part(name, index, self._shares_of_round(name, index))
        file = self._file(name, index)
        self._parts.pop((name, index), None)
        if part.low == part.high:
            file.unlink(missing_ok=True)
            return None
        try:
            if file.exists() and file.stat().st_nlink > 1:  # a checkpoint's
                file.unlink()
            if not file.exists():
                self._shrink_reserve(self.paths[index].path, part.file_bytes)
            opened = BlockFile(file, self.watch, writing=True)
            try:
                opened.resize(part.file_bytes)
            except OSError:
                opened.close()
                raise
        except OSError as error:
            fix = "make room" if error.errno in DISK_FULL else "look at the disk"
            raise RunStopped(f"{file} cannot be written ({reason(error)}): {fix}, then {GO_ON}") from error
        self._say_once(opened)
        return Transfer(opened, part, part.cut(tables))

    def written(self, name: str, index: int, part: Part) -> None:
        """Note a part that :meth:`Transfer.finish` gave."""
        self._parts[name, index] = part

    def reading(self, name: str, index: int, tables: Mapping[str, Tensor]) -> Transfer | None:
        """Begin to read a buffer's part on path ``index``; None where the path holds none of it."""
        part = self._parts.get((name, index))
        if part is None:
            return None
        file = self._file(name, index)
        try:
            opened = BlockFile(file, self.watch, writing=False)
        except OSError as error:
            raise RunStopped(f"{file} cannot be read ({reason(error)}): {GO_ON}") from error
        return Transfer(opened, part, part.cut(tables))

    def link(self, name: str, directory: Path) -> list[Path]:
        """Put the buffer's files into a directory, under their own names, durably.

        They are linked where the directory is on the same file system, else copied.

        Returns:
            The new files.
        """
        made = []
        for index in range(len(self.paths)):
            if (name, index) not in self._parts:
                continue
            file = self._file(name, index)
            with BlockFile(file, self.watch, writing=True) as opened:
                opened.sync()
            made.append(link_or_copy(file, directory / f"{name}.p{index}{SUFFIX}"))
        return made

    def adopt(self, name: str, index: int, file: Path) -> None:
        """Take a checkpoint's file as the content of a buffer's part: linked where possible, else copied."""
        part, _ = read_part(file)
        target = self._file(name, index)
        target.unlink(missing_ok=True)
        link_or_copy(file, target)
        self._parts[name, index] = part

    def close(self) -> None:
        """Remove this rank's files, but for what checkpoints hold, and give the paths free; once."""
        for team in self._teams.values():
            if not self.watch.hangs:
                team.close()
        self._teams.clear()
        for turn in self._turns.values():
            turn.close()
        for path in self.paths:
            self._clean(path.path)
        while self._booked:
            self._budget.release(*self._booked.pop())
        self._reserved = [0] * len(self.paths)
        self._resources.close()

    def _team(self, direction: str, index: int) -> Workers:
        key = direction, index
        if key not in self._teams:
            self._teams[key] = Workers(TRANSFERS)
        return self._teams[key]

    def _moved(self, index: int, direction: str, transfer: Transfer, start: float) -> int:
        nbytes = transfer.part.nbytes
        self.speeds.note(index, direction, nbytes, time.perf_counter() - start)
        return nbytes

    def _share(self, names: Iterable[str], index: int) -> int:
        """Bytes of buffers' files on a path."""
        parts = (self._part(name, index, self.speeds.shares) for name in names)
        return sum(part.file_bytes for part in parts if part.low < part.high)

    def _part(self, name: str, index: int, shares: Sequence[float]) -> Part:
        """What path ``index`` takes of a buffer that is divided by ``shares``."""
        form = self._forms[name]
        return Part(form, *split(form.numel, shares, self._numbers[name])[index])

    def _shares_of_round(self, name: str, index: int) -> Sequence[float]:
        """By what a buffer is divided that path ``index`` now writes: shares may change between two paths."""
        with self._rounds_lock:
            shares, paths = self._rounds.get(name, (self.speeds.shares, set()))
            if index in paths:
                shares, paths = self.speeds.shares, set()
            self._rounds[name] = shares, paths | {index}
            return shares

    def _file(self, name: str, index: int) -> Path:
        return self.paths[index].path / f"{self._prefix}{name}{SUFFIX}"

    def _clean(self, path: Path) -> None:
        """Remove what this rank of an earlier run left; nothing of other names."""
        for file in path.glob(f"{self._prefix}*"):
            file.unlink()

    def _check_writable(self, path: Path) -> None:
        probe = path / f"{self._prefix}probe"
        try:
            probe.write_bytes(b"\0")
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"memory.disk: {path} cannot be written to ({reason(error)}): name a directory that can"
            ) from error

    def _say_once(self, file: BlockFile) -> None:
        place = file.path.parent
        if not file.direct and place not in _said:
            _said.add(place)
            warnings.warn(
                f"{place} knows no direct I/O: its reads and writes go through the system's caches",
                stacklevel=2,
            )

    def _taken(self, path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob(f"{self._prefix}*"))

    def _held(self, path: Path, checkpoints: Sequence[Path]) -> int:
        """Bytes that buffers and links to earlier ones take on this path's file system, each file once."""
        device = path.stat().st_dev
        files = list(path.glob(f"{self._prefix}*{SUFFIX}"))
        files += [file for directory in checkpoints for file in directory.glob(f"*{SUFFIX}")]
        states = (file.stat() for file in files)
        sizes = {state.st_ino: state.st_size for state in states if state.st_dev == device}
        return sum(sizes.values())

    def _reserve_file(self, path: Path) -> Path:
        return path / f"{self._prefix}{_RESERVE}"

    def _shrink_reserve(self, path: Path, nbytes: int) -> None:
        file = self._reserve_file(path)
        if file.exists():
            os.truncate(file, max(0, file.stat().st_size - nbytes))

    def _set_reserve(self, path: Path, nbytes: int) -> None:
        with self._reserve_file(path).open("ab") as file:
            os.ftruncate(file.fileno(), 0)
            try:
                if not allocate(file.fileno(), nbytes):
                    os.ftruncate(file.fileno(), 0)
            except OSError as error:
                warnings.warn(
                    f"{path} has no room left for {format_size(nbytes)} that this run may still need "
                    f"({reason(error)}): make room",
                    stacklevel=2,
                )


_said: set[Path] = set()
"""Directories of which it was said already that they know no direct I/O."""
