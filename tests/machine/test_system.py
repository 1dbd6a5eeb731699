"""What the system says of itself, read from files as Linux writes them."""

import os
from pathlib import Path

import psutil
import pytest

from headrace.machine import quota, system


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")
    return folder


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "membership"


def test_version_2_quotas_of_all_groups_count_and_the_least_holds(tmp_path: Path, membership: Path) -> None:
    root = write(tmp_path / "cgroup")
    write(root / "outer", cpu__max="150000 100000\n")
    write(root / "outer" / "inner", cpu__max="max 100000\n")
    membership.write_text("0::/outer/inner\n", encoding="ascii")
    assert quota.cpu_quota(root, membership) == 1.5
    write(root / "outer" / "inner", cpu__max="50000 100000\n")
    assert quota.cpu_quota(root, membership) == 0.5


def test_version_1_quota(tmp_path: Path, membership: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "cpu" / "box", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    membership.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n2:cpuset:/box\n", encoding="ascii")
    assert quota.cpu_quota(root, membership) == 3.0
    write(root / "cpu" / "box", cpu__cfs_quota_us="-1\n")
    assert quota.cpu_quota(root, membership) is None


def test_a_container_that_names_the_hosts_group_has_its_limit_at_the_root(
    tmp_path: Path, membership: Path
) -> None:
    root = write(tmp_path / "cgroup", cpu__max="200000 100000\n")
    membership.write_text("0::/system.slice/docker-abc.scope\n", encoding="ascii")
    assert quota.cpu_quota(root, membership) == 2.0


def test_without_cgroups_there_is_no_quota(tmp_path: Path, membership: Path) -> None:
    assert quota.cpu_quota(tmp_path, membership) is None


def test_cores_are_those_of_the_process() -> None:
    cores = system.cores()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert (cores.affinity, cores.machine) == (affinity, os.cpu_count())
    assert 1 <= cores.used <= cores.affinity and cores.name


def test_memory_is_that_of_the_machine() -> None:
    memory = system.memory()
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available <= memory.total
    assert memory.limit is None or memory.limit < memory.total
    assert memory.huge_pages in (None, "always", "madvise", "never")


def test_the_innermost_mount_counts_and_of_two_on_one_place_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    lines = [
        "/dev/sda / ext4 rw 0 0",
        "server:/x /mnt nfs4 rw 0 0",
        "none /mnt/my\\040disk tmpfs rw 0 0",
        "/dev/sdb /mnt/my\\040disk xfs rw 0 0",
    ]
    mounts.write_text("\n".join(lines) + "\n", encoding="ascii")
    monkeypatch.setattr(system, "_MOUNTS", mounts)
    monkeypatch.setattr(system.sys, "platform", "linux")
    kinds = {path: system._file_system(Path(path)) for path in ("/mnt/my disk/run", "/mnt/other", "/home")}
    assert kinds == {"/mnt/my disk/run": "xfs", "/mnt/other": "nfs4", "/home": "ext4"}


def test_the_file_system_of_a_directory_is_found(tmp_path: Path) -> None:
    found = system.mount(tmp_path)
    assert found.path == str(tmp_path) and 0 < found.free <= found.total
    assert found.kind


def test_variables_that_are_set_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    found = system.thread_variables()
    assert found["OMP_NUM_THREADS"] == "3" and "LOCAL_WORLD_SIZE" not in found
