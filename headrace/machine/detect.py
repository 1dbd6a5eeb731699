"""The machine at hand, as far as it can be told without torch: memory and cores that this process may use."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.machine.cores import available_cores
from headrace.machine.machine import Machine

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = {  # version -> files of the limit, of what is used, and of the statistics; key of reclaimable caches
    2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
}


def detect(device_bytes: int | None = None, device_name: str = "", path: Path | None = None) -> Machine:
    """This machine, with the bytes that this process may hold: what it holds plus what is free.

    Args:
        device_bytes: bytes free on the accelerator, None without one; asking it is left to the caller.
        device_name: what the accelerator calls itself.
        path: a place on the disk to look at, which need not exist yet.
    """
    memory = host_bytes()
    tiers = {"ram": memory} if device_bytes is None else {"device": device_bytes, "host": memory}
    if path is not None:
        tiers["disk"] = disk_bytes(path)
    return Machine(device_name or "this machine", available_cores(), tiers)


def host_bytes() -> int:
    """Bytes of RAM that this process may hold: its own and what is free, within its cgroups' limits."""
    own = psutil.Process().memory_info().rss
    free = psutil.virtual_memory().available
    return own + min([free, *(group.free for group in cgroups())])


def disk_bytes(path: Path) -> int:
    """Bytes free on the disk of ``path``, or of the nearest parent that exists."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup's limit and what its processes hold of it, caches that can be dropped not counted."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.limit - self.used)


def cgroups(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[MemoryGroup]:
    """Every cgroup above this process that limits memory; empty where there is none or no Linux."""
    groups = []
    for version, folder in _folders(root, membership):
        limit_file, used_file, stat_file, cache = _FILES[version]
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None:
            groups.append(MemoryGroup(limit, max(0, used - _statistic(folder / stat_file, cache))))
    return groups


def _folders(root: Path, membership: Path) -> list[tuple[int, Path]]:
    """(version, folder) of the memory cgroups that hold this process, innermost first.

    A line of the membership file is ``0::/path`` in version 2, ``7:cpu,memory:/path`` in version 1. In a
    container the path may be one of the host's, which does not exist here; then its root holds the limits.
    """
    found = []
    for line in _text(membership).splitlines():
        number, controllers, place = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version, base = (2, root) if number == "0" else (1, root / "memory")
        inner = base / place.lstrip("/")
        folders = [inner, *inner.parents] if inner.is_dir() else [base]
        found += [(version, folder) for folder in folders if folder == base or base in folder.parents]
    return found


def _statistic(file: Path, key: str) -> int:
    rows = (line.split() for line in _text(file).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == key), 0)


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
