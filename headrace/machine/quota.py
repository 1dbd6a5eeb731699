"""The processor time that cgroups grant to this process."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_quota(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that the cgroups of this process grant, the least of them; None without a limit.

    Version 2 writes ``200000 100000`` (microseconds in each period) into cpu.max, version 1 the same into two
    files. In a container the membership may name one of the host's paths: then the root holds the limit.
    """
    quotas = []
    for line in _text(membership).splitlines():
        number, controllers, place = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        bases = [root] if number == "0" else [root / "cpu", root / "cpu,cpuacct"]
        for base in bases:
            inner = base / place.lstrip("/")
            quotas += [
                _quota(folder) for folder in (inner, *inner.parents) if base in (folder, *folder.parents)
            ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    limit, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not period:
        limit, period = (_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
