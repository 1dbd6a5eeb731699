"""Finding the newest complete checkpoint and streaming it back into place."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from headrace.checkpoint.directory import checkpoint_path, list_checkpoints, set_aside
from headrace.checkpoint.manifest import DamagedCheckpoint, Environment, Manifest
from headrace.checkpoint.tables import BlockFiles, SavedTables, TableFiles
from headrace.errors import RunStopped, UserError
from headrace.memory.blocks import Watch
from headrace.memory.parts import sealed, verify
from headrace.memory.tensorfile import Entry, sha256_of

_SHOWN = 5  # faults of a table that an error lists


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every size and checksum was verified when it was opened.

    Attributes:
        path: its directory.
        manifest: its step, files and environment.
        state: what was given to ``save_checkpoint``.
    """

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that were done."""
        return self.manifest.step

    @property
    def tables(self) -> list[str]:
        """Names of the saved tables."""
        return self._saved.tables()

    def names(self, table: str) -> list[str]:
        """Parameter names in ``table``."""
        return list(self._saved.forms(table))

    def read_into(self, table: str, name: str, pieces: Iterable[Tensor]) -> None:
        """Fill 1-D contiguous tensors, in order, with the elements of one parameter, cast to their dtype."""
        start = 0
        for piece in pieces:
            self._saved.read(table, name, start, piece)
            start += piece.numel()

    def fill(self, table: str, name: str, start: int, stop: int, target: Tensor) -> None:
        """Put elements ``start:stop`` of one parameter into a 1-D contiguous tensor, cast to its dtype."""
        assert target.numel() == stop - start, (name, start, stop, target.numel())
        self._saved.read(table, name, start, target)

    @property
    def blocks(self) -> list[Path]:
        """Files of a disk store that hold the states, if they come from one."""
        return self._saved.files if isinstance(self._saved, BlockFiles) else []

    def check(self, tables: Mapping[str, Sequence[Entry]]) -> None:
        """Make sure that the checkpoint holds these tables and parameters, in these forms, and no others.

        Raises UserError naming tables and parameters that are missing, left over, or of another form.
        """
        if set(tables) != set(self.tables):
            raise UserError(
                f"{self.path} holds the tables {', '.join(sorted(self.tables))}, wanted are "
                f"{', '.join(sorted(tables))}: go on with the update policy that wrote it"
            )
        for table, entries in tables.items():
            self._check(table, entries)

    @cached_property
    def _saved(self) -> SavedTables:
        if self.manifest.blocks:
            return BlockFiles(self.path, [record.name for record in self.manifest.blocks])
        return TableFiles(self.path, [record.name for record in self.manifest.files])

    def _check(self, table: str, entries: Sequence[Entry]) -> None:
        held = self._saved.forms(table)
        wanted = {entry.name: self._saved.form(entry) for entry in entries}
        faults = [f"{name} is missing" for name in wanted.keys() - held.keys()]
        faults += [f"{name} is not in the model" for name in held.keys() - wanted.keys()]
        both = held.keys() & wanted.keys()
        faults += [f"{n} is {held[n]}, not {wanted[n]}" for n in both if held[n] != wanted[n]]
        if faults:
            shown = [*sorted(faults)[:_SHOWN], *([f"{len(faults) - _SHOWN} more"] if faults[_SHOWN:] else [])]
            place = self._saved.place(table)
            raise UserError(f"{place} is of another model ({'; '.join(shown)}): go on with its own")


def choose_checkpoint(
    run: Path, choice: Literal["auto", "never"] | int, environment: Environment
) -> Checkpoint | None:
    """The checkpoint to start from, None to start afresh; ``choice`` is ``checkpoint.resume``.

    Changes nothing on the disk. Warns when the environment is not the one that wrote the checkpoint.

    Raises UserError when the chosen step is missing or damaged, or when checkpoints stand but none is usable.
    """
    checkpoint = _chosen(run, choice)
    if checkpoint and (changes := checkpoint.manifest.environment.differences(environment)):
        _warn(f"{checkpoint.path} was written elsewhere ({'; '.join(changes)}): equal to rounding only")
    return checkpoint


def leave_behind(run: Path, start: Checkpoint | None) -> list[Path]:
    """Set aside every checkpoint later than ``start``, all if None, with a warning each; returns their paths.

    To be called once the run really starts: it writes another future, and no later resume may mix the two.
    """
    first, origin = (0, "the beginning") if start is None else (start.step + 1, start.path.name)
    asides = []
    for step, path in list_checkpoints(run).items():
        if step >= first:
            asides.append(set_aside(path))
            _warn(f"{path} is set aside as {asides[-1].name}: the run starts from {origin}")
    return asides


def find_checkpoint(run: Path) -> Checkpoint | None:
    """The newest complete checkpoint, None where there is not one by name; changes nothing on the disk.

    Every damaged one on the way is named by a warning. Raises UserError when all are damaged.
    """
    damages = []
    for path in reversed(list_checkpoints(run).values()):
        try:
            return open_checkpoint(path)
        except DamagedCheckpoint as damage:
            if not path.exists():  # removed by the run that goes on, which left a newer one
                return find_checkpoint(run)
            damages.append(str(damage))
            _warn(f"{damage}; {path.name} is passed over")
    if damages:
        raise UserError(
            f"no checkpoint in {run} is complete ({'; '.join(damages)}): bring a copy back, or start afresh "
            "with checkpoint.resume=never"
        )
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint and verify all of its bytes, block by block.

    Raises DamagedCheckpoint, a UserError, for the first file that is missing, truncated or altered.
    """
    manifest = Manifest.read(path)
    if path.name != checkpoint_path(path, manifest.step).name:
        raise DamagedCheckpoint(f"{path} holds step {manifest.step}: it was renamed")
    _check_sizes(path, manifest)
    for record in manifest.files:
        if _sha256(path / record.name) != record.sha256:
            raise DamagedCheckpoint(f"{path / record.name} was altered: it does not fit its checksum")
    for record in manifest.blocks:
        _check_blocks(path / record.name, record.sha256)
    return Checkpoint(path, manifest, json.loads((path / "state.json").read_bytes()))


def _check_blocks(file: Path, seal: str) -> None:
    """Its header is sealed by the manifest, and holds a checksum of every block."""
    try:
        whole = sealed(file) == seal
        if whole:
            verify(file, Watch())
    except (UserError, RunStopped, OSError) as error:
        raise DamagedCheckpoint(f"{file} was altered ({error})") from error
    if not whole:
        raise DamagedCheckpoint(f"{file} was altered: it does not fit its checksum")


def has_all_bytes(path: Path) -> bool:
    """Whether all files are there with their sizes: what can be said of a checkpoint without reading it."""
    try:
        _check_sizes(path, Manifest.read(path))
    except UserError:
        return False
    return True


def _chosen(run: Path, choice: Literal["auto", "never"] | int) -> Checkpoint | None:
    if choice == "never":
        return None
    if choice == "auto":
        return find_checkpoint(run)
    there = list_checkpoints(run)
    others = ", ".join(str(step) for step in there if step != choice) or "none"
    if choice not in there:
        raise UserError(f"checkpoint.resume={choice}: there is no such step in {run}; there are: {others}")
    try:
        return open_checkpoint(there[choice])
    except DamagedCheckpoint as damage:
        raise UserError(f"checkpoint.resume={choice}: {damage}; other steps there are: {others}") from damage


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for record in (*manifest.files, *manifest.blocks):
        file = path / record.name
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        if (size := file.stat().st_size) != record.size:
            raise DamagedCheckpoint(f"{file} has {size} bytes instead of {record.size}")


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
