"""What the operating system says of cores, threads, memory and disks, for people to read. No torch."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.machine.cores import available_cores
from headrace.machine.detect import cgroups
from headrace.machine.quota import cpu_quota

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LOCAL_WORLD_SIZE",
    "SLURM_CPUS_PER_TASK",
)
"""What launchers and users set, and what has a say in how many threads run and how they wait."""

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MOUNTS = Path("/proc/self/mounts")


@dataclass(frozen=True)
class Cores:
    """Cores by the system's own accounts.

    Attributes:
        name: what the processor calls itself.
        machine: how many there are.
        affinity: how many this process may run on.
        quota: cores' worth of time that its cgroup grants; None without a limit.
        used: how many threads the update will take: see :func:`~headrace.machine.cores.update_threads`.
        load: processes that wanted to run in the last minute, on average; None where it is not known.
    """

    name: str
    machine: int
    affinity: int
    quota: float | None
    used: int
    load: float | None


@dataclass(frozen=True)
class Memory:
    """RAM in bytes.

    Attributes:
        total: what is built in.
        available: what can be taken without swapping.
        limit: the least that a cgroup around this process allows; None without one.
        swap_total: size of the swap space.
        swap_used: what of it is in use.
        huge_pages: ``always``, ``madvise`` or ``never``; None where there are none.
    """

    total: int
    available: int
    limit: int | None
    swap_total: int
    swap_used: int
    huge_pages: str | None


@dataclass(frozen=True)
class Mount:
    """The file system of a path, and the bytes of it.

    Attributes:
        path: the place asked for.
        kind: such as ``ext4`` or ``nfs``; empty where the system does not say.
        total: its size.
        free: what this process may still take.
    """

    path: str
    kind: str
    total: int
    free: int


def cores() -> Cores:
    """The cores of this machine and this process."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Cores(_processor(), os.cpu_count() or 1, affinity, cpu_quota(), available_cores(), load)


def memory() -> Memory:
    """The RAM of this machine and this process."""
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit = min((group.limit for group in cgroups()), default=None)
    below = limit if limit is not None and limit < ram.total else None
    return Memory(ram.total, ram.available, below, swap.total, swap.used, _huge_pages())


def mount(path: Path) -> Mount:
    """The file system that holds ``path``, which exists."""
    usage = psutil.disk_usage(str(path))
    return Mount(str(path), _file_system(path.resolve()), usage.total, usage.free)


def thread_variables() -> dict[str, str]:
    """Those of :data:`THREAD_VARIABLES` that are set."""
    return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


def _processor() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _huge_pages() -> str | None:
    """The mode in brackets: ``always [madvise] never``."""
    return next((word.strip("[]") for word in _text(_HUGE_PAGES).split() if word.startswith("[")), None)


def _file_system(path: Path) -> str:
    """The kind of the innermost mount above ``path``; of several on one place the last is on top."""
    if sys.platform == "linux":
        found = [line.split(" ")[1:3] for line in _text(_MOUNTS).splitlines()]
    else:
        found = [[part.mountpoint, part.fstype] for part in psutil.disk_partitions(all=True)]
    kind, depth = "", -1
    for place, name in found:
        at = Path(place.replace("\\040", " "))
        if at in (path, *path.parents) and len(at.parts) >= depth:
            kind, depth = name, len(at.parts)
    return kind


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
