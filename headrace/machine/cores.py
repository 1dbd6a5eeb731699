"""How many threads this process should run, and what that number comes from."""

import os
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.machine.quota import cpu_quota


@dataclass(frozen=True)
class Threads:
    """A number of threads, and what it comes from: ``affinity``, ``cgroup quota of 2.5 cores``..."""

    count: int
    origin: str


def available_cores() -> int:
    """Cores that this process may use: :func:`update_threads` without the reason."""
    return update_threads().count


def update_threads() -> Threads:
    """Threads of the update: the cores of this process.

    The least of its affinity, its cgroups' quota and ``SLURM_CPUS_PER_TASK``, shared evenly among the ranks
    of a launcher on this node (``LOCAL_WORLD_SIZE``). ``OMP_NUM_THREADS``, which launchers set to 1, does not
    count: it speaks of OpenMP's threads, and the update runs on threads of its own.

    Raises:
        UserError: a variable that is not a number.
    """
    found = min(_limits(), key=lambda threads: threads.count)
    ranks = _variable("LOCAL_WORLD_SIZE") or 1
    if ranks == 1:
        return found
    return Threads(max(1, found.count // ranks), f"{found.origin}, shared by {ranks} ranks")


def compute_threads() -> Threads:
    """Threads of forward and backward: as those of the update, or as ``OMP_NUM_THREADS`` says.

    torchrun and accelerate set ``OMP_NUM_THREADS=1`` for every rank where nobody has set it; among ranks, 1
    is no wish.
    """
    count = _variable("OMP_NUM_THREADS", strict=False)
    if count is None or (count == 1 and "LOCAL_WORLD_SIZE" in os.environ):
        return update_threads()
    return Threads(count, f"OMP_NUM_THREADS={count}")


def auto_threads() -> dict[str, Threads]:
    """What ``auto`` stands for here, by key of the run file's ``threads``."""
    return {"compute": compute_threads(), "update": update_threads()}


def _limits() -> list[Threads]:
    """Every limit there is; of equal ones the first names the origin."""
    known = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    limits = [Threads(cores, "affinity" if known else "all cores")]
    if (quota := cpu_quota()) is not None:
        limits.append(Threads(max(1, int(quota)), f"cgroup quota of {quota:g} cores"))
    if (task := _variable("SLURM_CPUS_PER_TASK")) is not None:
        limits.append(Threads(task, f"SLURM_CPUS_PER_TASK={task}"))
    return limits


def _variable(name: str, strict: bool = True) -> int | None:
    """A variable's number; None where it is not set, or is not one and nobody asked to be ``strict``."""
    text = os.environ.get(name, "").strip()
    if text.isascii() and text.isdigit() and int(text) >= 1:
        return int(text)
    if text and strict:
        raise UserError(
            f"{name}={text} must be a whole number of at least 1: correct the variable or unset it"
        )
    return None
