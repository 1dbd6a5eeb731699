"""Writing a checkpoint so that a kill at any instant leaves it complete or absent, never torn."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.checkpoint.directory import (
    checkpoint_path,
    list_checkpoints,
    remove,
    set_aside,
    work_path,
)
from headrace.checkpoint.manifest import DamagedCheckpoint, Environment, Manifest, write_durably
from headrace.checkpoint.restore import has_all_bytes, open_checkpoint
from headrace.checkpoint.space import free_bytes, readable
from headrace.errors import RunStopped
from headrace.memory.durable import DISK_FULL, sync_directory
from headrace.memory.parts import sealed
from headrace.memory.tensorfile import Entry, FileRecord, sha256_of, write_tensors


def save_checkpoint(
    run: Path,
    step: int,
    tables: Mapping[str, Sequence[Entry]],
    state: Mapping[str, Any],
    *,
    environment: Environment,
    keep: int,
    beside: Callable[[Path], None] | None = None,
    linked: Callable[[Path], Sequence[Path]] | None = None,
) -> Path:
    """Write ``run/checkpoint-STEP`` durably, then remove older complete ones beyond ``keep``.

    Args:
        run: the run directory, created if missing; held by a DirectoryLock, and cleaned of leftovers.
        step: optimizer steps that are done.
        tables: table name -> its tensors by parameter name in logical element order; a file each, streamed
            with no more memory than one piece.
        state: everything else, plain JSON data with text keys; comes back as it went.
        environment: what a bit-equal continuation needs.
        keep: complete checkpoints that stay, this one included.
        beside: writes and syncs further files, under other names than those of tables, into the directory
            given.
        linked: puts files of a disk store there, durably, and returns them; tables are none then.

    A complete checkpoint of the same step stands, for a step of a run has one state; a damaged one is set
    aside. Later steps must have been left behind (:func:`headrace.checkpoint.restore.leave_behind`).

    Raises RunStopped when the disk is full; earlier checkpoints are then as they were.
    """
    assert keep >= 1 and step >= max(list_checkpoints(run), default=0), (keep, step)
    final = checkpoint_path(run, step)
    if not _stands(final):
        with _written_aside(run, step) as aside:
            files = [write_tensors(aside / f"{table}.safetensors", rows) for table, rows in tables.items()]
            files.append(write_durably(aside / "state.json", json.dumps(state)))
            if beside is not None:
                beside(aside)
                files += _others(aside, files)
            blocks = [_block_record(path) for path in linked(aside)] if linked is not None else []
            Manifest(step, tuple(files), environment, tuple(blocks)).write(aside)
    _remove_older(run, step, keep)
    return final


def _block_record(path: Path) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, sealed(path))


def _others(directory: Path, known: Sequence[FileRecord]) -> list[FileRecord]:
    """Records of the files that are not known yet."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    for record in known:
        del paths[record.name]
    return [FileRecord(name, path.stat().st_size, sha256_of(path)) for name, path in sorted(paths.items())]


def _stands(path: Path) -> bool:
    """Whether a complete checkpoint is at ``path``; anything else there is set aside."""
    if not path.exists():
        return False
    try:
        open_checkpoint(path)
    except DamagedCheckpoint:
        set_aside(path)
        return False
    return True


@contextmanager
def _written_aside(run: Path, step: int) -> Iterator[Path]:
    """A new hidden directory that becomes the checkpoint at the end of the block, or vanishes."""
    aside = work_path(run, step, "saving")
    try:
        aside.mkdir(parents=True)
        yield aside
        sync_directory(aside)
        aside.rename(checkpoint_path(run, step))
        sync_directory(run)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise _disk_full(run, step, error) from error
        raise


def _disk_full(run: Path, step: int, error: OSError) -> RunStopped:
    intact = ", ".join(path.name for path in list_checkpoints(run).values())
    return RunStopped(
        f"checkpoint-{step} could not be written to {run} ({error.strerror}, {readable(free_bytes(run))} "
        f"free): {f'{intact} stands as before' if intact else 'there is no earlier one'}, make room and go on"
    )


def _remove_older(run: Path, step: int, keep: int) -> None:
    """What lacks files or bytes neither counts nor goes: its owner may want to look at it."""
    older = [old for old, path in list_checkpoints(run).items() if old < step and has_all_bytes(path)]
    for old in older[: max(0, len(older) + 1 - keep)]:
        remove(run, old)
