"""Names and small files that survive a kill and a power cut. No torch."""

import errno
import os
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the OSErrors that mean: no room for what was to be written."""


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Wait until the names in a directory are on the disk: a rename is durable only after this."""
    if os.name != "posix":  # Windows cannot open a directory, and orders its renames itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in one step: a kill or a full disk leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
