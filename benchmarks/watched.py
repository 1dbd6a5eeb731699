"""A process seen from outside: what it and its children hold and write, and when it said what."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOOK = 0.02
"""Seconds between two looks."""


@dataclass
class Watched:
    """What was seen.

    Attributes:
        code: exit status.
        peak: highest resident bytes, summed over the process and its children at one look.
        written: bytes that they sent to disks.
        lines: seconds since the start, and a line of standard output.
        errors: the end of standard error.
    """

    code: int = -1
    peak: int = 0
    written: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)
    errors: str = ""


def watch(
    command: Sequence[str], environment: Mapping[str, str] | None = None, show: bool = False
) -> Watched:
    """Run a command until it ends, in a session of its own.

    Args:
        command: program and arguments.
        environment: added to this process's.
        show: whether its lines are printed as they come.
    """
    seen, start = Watched(), time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    errors: list[str] = []
    reading = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    looking = threading.Thread(target=_look, args=(process, seen), daemon=True)
    reading.start()
    looking.start()
    for line in process.stdout or ():
        seen.lines.append((time.monotonic() - start, line.rstrip("\n")))
        if show:
            print(f"  {line}", end="", flush=True)
    seen.code = process.wait()
    looking.join()
    reading.join(1.0)
    seen.errors = "".join(errors[-20:])
    return seen


def _look(process: subprocess.Popen, seen: Watched) -> None:
    written: dict[int, int] = {}
    while process.poll() is None:
        held = 0
        for pid in _tree(process.pid):
            held += _number(f"/proc/{pid}/status", "VmRSS:") * 1024
            written[pid] = max(written.get(pid, 0), _number(f"/proc/{pid}/io", "write_bytes:"))
        seen.peak = max(seen.peak, held)
        seen.written = sum(written.values())
        time.sleep(LOOK)


def _tree(root: int) -> Iterator[int]:
    yield root
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            children = task.read_text(encoding="ascii").split()
        except OSError:
            continue
        for child in children:
            yield from _tree(int(child))


def _number(path: str, key: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(key)), 0)
    except OSError:
        return 0


if __name__ == "__main__":
    result = watch(sys.argv[1:], show=True)
    print(f"{result.peak / 2**20:,.0f} MiB at most, {result.written / 1e9:.2f} GB written")
