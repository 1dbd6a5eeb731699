"""Names and small files that survive a kill and a power cut. No torch."""

import os
from pathlib import Path


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
    """Write a text file in one step: a kill leaves the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)
