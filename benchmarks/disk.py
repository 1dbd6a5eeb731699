"""How near the disk's best is the disk store? Ours beside fio and a bare thread loop, interleaved in one run.

    apt-get install fio        # a peer; without it the bare loop alone stands beside ours
    python -m benchmarks.disk --json

All write and read the same number of bytes past the system's caches, in a file of their own on the same file
system. Ours also computes and compares checksums. Then three throttled paths show whether the split over them
reaches the sum of their speeds.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from headrace.memory.process import prepare_process

prepare_process()

import torch  # noqa: E402

from benchmarks.report import Check, finish  # noqa: E402
from headrace.ledger import Ledger  # noqa: E402
from headrace.memory import blocks  # noqa: E402
from headrace.memory.budget import Budget  # noqa: E402
from headrace.memory.disk import DiskPath, DiskStore  # noqa: E402
from headrace.memory.parts import Form  # noqa: E402
from headrace.memory.pool import HostPool, map_bytes  # noqa: E402

MIB = 2**20
ENGINES = [("io_uring", 8, 1), ("libaio", 8, 1), ("psync", 1, 3)]
"""fio's engine, its depth, its jobs."""
LOOPS = [(threads, block) for threads, block in product((1, 2, 3, 4), (2 * MIB, 4 * MIB, 8 * MIB))]
"""Threads and block of the bare loop."""
THROTTLED = (100 * MIB, 50 * MIB, 25 * MIB)
"""Bytes a second of the paths in the test of the split."""

Row = Callable[[str], float]
"""Writes or reads once (``write``, ``read``) and returns bytes a second."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--size", type=int, default=1024, help="MiB")
    arguments.add_argument("--home", type=Path, default=Path())
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.home, prefix=".benchmark-disk-") as home:
        place = Path(home)
        with ours(place, given.size * MIB) as headrace:
            rows: dict[str, Row] = {"headrace": headrace, **loops(place, given.size * MIB)}
            rows |= fio(place, given.size) if shutil.which("fio") else {}
            found = measured(rows, given.rounds)
        split = split_share(place)
    report(found, split, given.json)


def measured(rows: Mapping[str, Row], rounds: int) -> dict[tuple[str, str], float]:
    """(row, direction) -> the median of bytes a second; the first round is not among them."""
    found: dict[tuple[str, str], list[float]] = {}
    for number, direction, (name, row) in product(range(rounds + 1), ("write", "read"), rows.items()):
        speed = row(direction)
        if number:
            found.setdefault((name, direction), []).append(speed)
    return {key: median(speeds) for key, speeds in found.items()}


def report(found: Mapping[tuple[str, str], float], split: float, as_json: bool) -> None:
    figures = {f"{name}: {direction} GB/s": speed / 1e9 for (name, direction), speed in found.items()}
    names = list(dict.fromkeys(name for name, _ in found))
    print(f"  {'GB/s':32} {'write':>7} {'read':>7}")
    for name in names:
        print(f"  {name:32} {found[name, 'write'] / 1e9:7.2f} {found[name, 'read'] / 1e9:7.2f}")
    checks = []
    for direction in ("write", "read"):
        best = max(found[name, direction] for name in names if name != "headrace")
        share = found["headrace", direction] / best
        checks.append(Check(f"headrace: share of the best {direction}", share, 0.90, share >= 0.90))
    name = "three throttled paths: share of the sum of their speeds"
    figures[name] = split
    checks.append(Check(name, split, 0.95, split >= 0.95))
    finish(figures, checks, as_json)


@contextmanager
def ours(home: Path, nbytes: int) -> Iterator[Row]:
    """A buffer of the disk store, as a run reads and writes it."""
    store = DiskStore([DiskPath(home / "ours")], Budget("disk", None, Ledger(), "memory.disk"))
    form = Form({"states": torch.float32}, nbytes // 4)
    store.declare("b0", form)
    pool = HostPool(Budget("ram", None, Ledger(), "memory.host"))
    tables = {"states": pool.take(form.numel, torch.float32, "buffers", "states").normal_()}

    def row(direction: str) -> float:
        start = time.perf_counter()
        getattr(store, direction)("b0", 0, tables)
        return nbytes / (time.perf_counter() - start)

    yield row
    store.close()


def loops(home: Path, nbytes: int) -> dict[str, Row]:
    """A bare loop of threads that write and read, for several numbers of threads and sizes of blocks."""
    memory = memoryview(map_bytes(nbytes))
    memory[:] = os.urandom(MIB) * (nbytes // MIB)
    path = home / "loop"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))

    def run(threads: int, block: int, direction: str) -> float:
        call = os.pwritev if direction == "write" else os.preadv

        def part(first: int) -> None:
            for start in range(first * block, nbytes, threads * block):
                call(descriptor, [memory[start : start + block]], start)

        begin = time.perf_counter()
        running = [threading.Thread(target=part, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return nbytes / (time.perf_counter() - begin)

    return {f"loop, {n} threads, {block // MIB} MiB": partial(run, n, block) for n, block in LOOPS}


def fio(home: Path, mib: int) -> dict[str, Row]:
    """fio's engines, with small and with huge pages for its buffers."""

    def run(engine: str, depth: int, jobs: int, huge: bool, direction: str) -> float:
        environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {})
        command = ["fio", "--name=job", f"--filename={home / 'fio'}", f"--size={mib // jobs}M", "--bs=4M"]
        command += [f"--rw={direction}", f"--ioengine={engine}", f"--iodepth={depth}", f"--numjobs={jobs}"]
        command += ["--direct=1", f"--offset_increment={mib // jobs}M", "--group_reporting"]
        command += ["--thread", "--output-format=json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"])

    return {
        f"fio, {engine}{', huge pages' if huge else ''}": partial(run, engine, depth, jobs, huge)
        for (engine, depth, jobs), huge in product(ENGINES, (False, True))
    }


def split_share(home: Path) -> float:
    """The speed of a buffer over throttled paths, measured and divided by the store, over the ideal."""
    real, gates = (blocks.write_at, blocks.read_at), [threading.Lock() for _ in THROTTLED]

    def throttled(call: Callable[[int, memoryview, int], int], descriptor: int, *rest: Any) -> int:
        number = int(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name)
        with gates[number]:  # one at a time, as a device does
            start = time.perf_counter()
            done = call(descriptor, *rest)
            time.sleep(max(0.0, done / THROTTLED[number] - (time.perf_counter() - start)))
        return done

    blocks.write_at, blocks.read_at = (partial(throttled, call) for call in real)
    try:
        return _split_share(home)
    finally:
        blocks.write_at, blocks.read_at = real


def _split_share(home: Path) -> float:
    paths = [DiskPath(home / str(number)) for number in range(len(THROTTLED))]
    store = DiskStore(paths, Budget("disk", None, Ledger(), "memory.disk"))
    nbytes = 2 * sum(THROTTLED)
    form = Form({"states": torch.float32}, nbytes // 4)
    store.declare("b0", form)
    pool = HostPool(Budget("ram", None, Ledger(), "memory.host"))
    tables = {"states": pool.take(form.numel, torch.float32, "buffers", "states")}
    start = time.perf_counter()
    for direction in ("write", "read"):
        move = getattr(store, direction)
        running = [threading.Thread(target=move, args=("b0", path, tables)) for path in range(len(paths))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    seconds = time.perf_counter() - start
    store.close()
    return 2 * nbytes / sum(THROTTLED) / seconds


if __name__ == "__main__":
    main()
