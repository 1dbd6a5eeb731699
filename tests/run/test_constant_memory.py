"""Nothing grows from step to step: resident memory of a long run with everything on the disk."""

import subprocess
import sys
import time

import evidence
import pytest
from test_disk_run import larger, on_disk

__all__ = ["larger"]

STEPS, SETTLED = 400, 200
"""Until the trace's ring is full, and the first checkpoint has been written, memory may still grow."""
MIB = 2**20


def resident(process):
    with open(f"/proc/{process.pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def sampled(run):
    """(step, resident bytes) at the end of every step that a look found."""
    metrics = evidence.home(run) / "metrics.jsonl"
    found, seen = [], 0
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", str(run)], stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines > seen:
                found.append((lines, resident(process)))
                seen = lines
            time.sleep(0.005)
    assert process.returncode == 0
    return found


def slope(points):
    """Bytes a step, by least squares."""
    steps, sizes = zip(*points, strict=True)
    mean_x, mean_y = sum(steps) / len(steps), sum(sizes) / len(sizes)
    spread = sum((x - mean_x) ** 2 for x in steps)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_hundred_steps(write_run, larger, tmp_path):
    values = on_disk(tmp_path, "a", "b", weights="disk", activations="disk")
    values |= {"train__steps": STEPS, "train__eval_every": 50, "checkpoint": {"every": 50, "keep": 1}}
    run = write_run("long", model__path=larger, **values)
    points = [point for point in sampled(run) if SETTLED <= point[0] < STEPS]
    assert len(points) > SETTLED / 2
    found = slope(points)
    print(f"{len(points)} looks, {found / MIB:+.4f} MiB a step, {points[-1][1] / MIB:.0f} MiB at the end")
    assert abs(found) < 0.1 * MIB
