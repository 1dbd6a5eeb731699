"""A second name for a file: a link where that is possible."""

import os
import shutil
import warnings
from pathlib import Path

from headrace.errors import reason
from headrace.memory.durable import sync_directory


def device_of(path: Path) -> int:
    """The file system of a path, or of the nearest parent that exists: links work within one."""
    places = (path.absolute(), *path.absolute().parents)
    return next(place for place in places if place.exists()).stat().st_dev


def link_or_copy(source: Path, target: Path) -> Path:
    """Give a file a second name, durably; a copy where there are no links, said once. Returns the name."""
    try:
        os.link(source, target)
    except OSError as error:
        if source.parent not in _copied:
            _copied.add(source.parent)
            warnings.warn(
                f"{target.parent.parent} cannot link to files in {source.parent} ({reason(error)}): states "
                "are copied at every checkpoint and resume",
                stacklevel=2,
            )
        shutil.copyfile(source, target)
        with target.open("rb+") as file:
            os.fsync(file.fileno())
    sync_directory(target.parent)
    return target


_copied: set[Path] = set()
"""Directories of which it was said already that they cannot be linked from."""
