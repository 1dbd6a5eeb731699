"""How many threads a process takes, under launchers and in containers."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.machine import cores
from headrace.machine.cores import Threads, compute_threads, update_threads
from headrace.machine.quota import cpu_quota

VARIABLES = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def eight_cores(monkeypatch):
    """A process that may run on eight cores, whose cgroup limits nothing."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)


@pytest.fixture
def granted(monkeypatch, tmp_path):
    """Gives this process's cgroup a quota, in files as Linux writes them."""

    def grant(text):
        (tmp_path / "membership").write_text("0::/job\n")
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "cpu.max").write_text(text)
        monkeypatch.setattr(cores, "cpu_quota", partial(cpu_quota, tmp_path, tmp_path / "membership"))

    return grant


@pytest.mark.parametrize(
    ("variables", "update", "compute"),
    [
        ({}, Threads(8, "affinity"), None),
        ({"SLURM_CPUS_PER_TASK": "3"}, Threads(3, "SLURM_CPUS_PER_TASK=3"), None),
        ({"SLURM_CPUS_PER_TASK": "64"}, Threads(8, "affinity"), None),
        ({"LOCAL_WORLD_SIZE": "1"}, Threads(8, "affinity"), None),
        ({"LOCAL_WORLD_SIZE": "3"}, Threads(2, "affinity, shared by 3 ranks"), None),
        ({"LOCAL_WORLD_SIZE": "16"}, Threads(1, "affinity, shared by 16 ranks"), None),
        ({"OMP_NUM_THREADS": "5"}, Threads(8, "affinity"), Threads(5, "OMP_NUM_THREADS=5")),
        ({"OMP_NUM_THREADS": "1"}, Threads(8, "affinity"), Threads(1, "OMP_NUM_THREADS=1")),
        ({"OMP_NUM_THREADS": "4,2"}, Threads(8, "affinity"), None),
        # As torchrun does: 1 is its default and nobody's wish, another number is somebody's.
        (
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"},
            Threads(4, "affinity, shared by 2 ranks"),
            None,
        ),
        (
            {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2"},
            Threads(4, "affinity, shared by 2 ranks"),
            Threads(2, "OMP_NUM_THREADS=2"),
        ),
    ],
)
def test_the_least_limit_counts(eight_cores, monkeypatch, variables, update, compute):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert update_threads() == update
    assert compute_threads() == (compute or update)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250000 100000\n", Threads(2, "cgroup quota of 2.5 cores")),
        ("50000 100000\n", Threads(1, "cgroup quota of 0.5 cores")),
        ("1600000 100000\n", Threads(8, "affinity")),
        ("max 100000\n", Threads(8, "affinity")),
    ],
)
def test_a_containers_quota_counts(eight_cores, granted, text, expected):
    granted(text)
    assert update_threads() == compute_threads() == expected


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["many", "0", "-2", "1.5"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}={value} must be a whole number of at least 1"):
        update_threads()


def test_without_an_affinity_all_cores_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    assert update_threads() == Threads(3, "all cores")


WORKERS = """
import torch
from headrace.optim.offloaded import OffloadedAdamW
optimizer = OffloadedAdamW([torch.nn.Parameter(torch.zeros(4))])
print(optimizer.lanes.workers.count)
optimizer.close()
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinities")
def test_what_torchrun_sets_does_not_starve_the_update():
    """torchrun --nproc-per-node 2 gives every rank OMP_NUM_THREADS=1."""
    launched = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", WORKERS]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=launched, cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) == update_threads().count
