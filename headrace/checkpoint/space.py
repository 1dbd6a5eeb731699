"""Room on the disk for the checkpoints of a run, looked at before the first step."""

import shutil
from pathlib import Path

from headrace.checkpoint.directory import list_checkpoints
from headrace.errors import UserError


def check_space(run: Path, bytes_of_one: int, keep: int) -> None:
    """Make sure that ``keep`` checkpoints and the one being written fit beside what the disk holds.

    Checkpoints that stand in ``run`` once later ones were left behind count as a part of them: they go as new
    ones come.

    Raises UserError with the numbers when the disk has not enough free space.
    """
    held = sum(_size(path) for path in list_checkpoints(run).values())
    needed, free = _needed(bytes_of_one, keep, held), free_bytes(run)
    if needed <= free:
        return
    fewer = min(keep - 1, (free + held) // bytes_of_one - 1)
    fits = fewer >= 1 and _needed(bytes_of_one, fewer, held) <= free
    fix = f"set checkpoint.keep={fewer}" if fits else "make room"
    raise UserError(
        f"checkpoint.keep={keep} and the one being written, {readable(bytes_of_one)} each, need "
        f"{readable(needed)} more in {run}, where {readable(free)} are free: {fix}, or choose an out on a "
        "larger disk"
    )


def _needed(bytes_of_one: int, keep: int, held: int) -> int:
    # However much is held: old checkpoints go only after the next one is complete.
    return max(bytes_of_one, (keep + 1) * bytes_of_one - held)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write where ``path`` stands or will stand."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


def readable(nbytes: int) -> str:
    """Bytes for people: ``91.5 GiB``, ``3.2 MiB``."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB")
    return f"{nbytes / unit:.1f} {name}"


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
