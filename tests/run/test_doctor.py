"""`headrace doctor`: each thing that is slow is said with its fix, and nothing else is."""

import json
import re
from dataclasses import replace

import cli_process
import pytest

from headrace.errors import UserError
from headrace.machine.system import Cores, Memory, Mount
from headrace.memory.disk_speed import DiskSpeed
from headrace.run.doctor import OPTIONAL, REQUIRED, Accelerator, Health, checkpoint_seconds, examine

GIB = 2**30
SOUND = Health(
    versions={},
    cores=Cores("a processor", machine=8, affinity=8, quota=None, used=8, load=0.3),
    threads={"compute": 8, "update": 8},
    variables={"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "OMP_PROC_BIND": "false"},
    memory=Memory(64 * GIB, 50 * GIB, None, 8 * GIB, 0, "madvise"),
    mount=Mount("/runs", "ext4", 900 * GIB, 500 * GIB),
    disk=DiskSpeed(True, 2e9, 3e9),
    accelerator=None,
    no_accelerator="torch is a build for CPUs",
    cpu_flops={"fp32": 4e11, "bf16": 8e11},
)


def changed(**parts):
    """A sound machine in which values of a part differ, or a whole part."""
    values = {
        name: replace(getattr(SOUND, name), **part) if isinstance(part, dict) and name in NESTED else part
        for name, part in parts.items()
    }
    return replace(SOUND, **values)


NESTED = ("cores", "memory", "mount", "disk")


def test_a_sound_machine_has_nothing_to_complain_of():
    assert SOUND.findings() == []


@pytest.mark.parametrize(
    ("parts", "what", "fix"),
    [
        ({"cores": {"quota": 2.5, "used": 2}}, r"the time of 2\.5 of 8 cores", "a higher limit"),
        ({"cores": {"quota": 0.5, "used": 1}}, r"the time of 0\.5 of 8 cores", "a higher limit"),
        ({"cores": {"affinity": 3, "used": 3}}, "may use 3 of 8 cores", "start it with"),
        ({"cores": {"load": 5.0}}, r"other programs wanted 5\.0 of 8 cores", "end them"),
        (
            {"cores": {"used": 4}, "variables": {"LOCAL_WORLD_SIZE": "2"}},
            "takes 4 of 8 cores",
            "unset LOCAL_WORLD_SIZE",
        ),
        ({"variables": {"OMP_WAIT_POLICY": "ACTIVE"}}, "OMP_WAIT_POLICY=active", "unset OMP_WAIT_POLICY"),
        (
            {"cores": {"affinity": 1, "used": 1}, "variables": {"OMP_PROC_BIND": "close"}},
            "OMP_PROC_BIND=close",
            "unset OMP_PROC_BIND",
        ),
        ({"memory": {"swap_used": 3 * GIB}}, r"3\.0 GiB are swapped out", r"memory\.host"),
        ({"memory": {"available": 5 * GIB}}, r"only 5\.0 of 64\.0 GiB of RAM are free", "end what"),
        ({"memory": {"huge_pages": "never"}}, "huge pages are off", "echo madvise"),
        ({"mount": {"kind": "tmpfs"}}, r"/runs lies in RAM \(tmpfs\)", "on a disk"),
        ({"mount": {"kind": "nfs4"}}, "/runs lies on nfs4", "of this machine"),
        ({"mount": {"kind": "fuse.sshfs"}}, r"lies on fuse\.sshfs", "of this machine"),
        ({"disk": {"write": 60e6}}, "/runs writes 60 MB/s", r"checkpoint\.every"),
        ({"disk": None}, "/runs could not be measured", "make room"),
        ({"cpu_flops": {"fp32": 4e11, "bf16": 1e11}}, r"bf16 runs at 0\.25 of", r"model\.dtype=fp32"),
        (
            {"no_accelerator": "torch is a build for CPUs, but there is an NVIDIA driver"},
            "the card is not used: torch is a build for CPUs",
            "CUDA build",
        ),
        (
            {"accelerator": Accelerator("GTX 1080", 8 * GIB, 7 * GIB, False), "no_accelerator": ""},
            "GTX 1080 has no bf16 units",
            r"model\.dtype=fp32",
        ),
    ],
)
def test_what_is_slow_is_said_once_with_its_fix(parts, what, fix):
    (finding,) = changed(**parts).findings()
    assert re.search(what, finding.what) and re.search(fix, finding.fix) and finding.why


def test_quotas_that_fit_are_no_finding():
    assert changed(cores={"quota": 8.0}).findings() == []
    assert changed(cores={"quota": 12.0}).findings() == []


def test_a_slow_cpu_does_not_matter_beside_a_card():
    card = Accelerator("a card", 24 * GIB, 23 * GIB, True)
    flops = {"fp32": 4e11, "bf16": 1e11}
    assert changed(accelerator=card, no_accelerator="", cpu_flops=flops).findings() == []


def test_a_checkpoint_takes_twelve_bytes_a_parameter():
    assert checkpoint_seconds(DiskSpeed(True, 2e9, 3e9), 1e9) == 6.0


def test_this_machine_is_examined_and_left_as_it_was(tmp_path):
    health = examine(tmp_path)
    assert not list(tmp_path.iterdir())
    assert set(health.versions) == {"Python", *REQUIRED, *OPTIONAL}
    assert all(health.versions[name] for name in REQUIRED)
    assert health.disk is not None and min(health.cpu_flops.values()) > 0
    assert (health.accelerator is None) == bool(health.no_accelerator)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no directory .*nowhere"):
        examine(tmp_path / "nowhere")


def test_the_page_and_the_json_say_the_same(processes, tmp_path):
    code, printed, errors = cli_process.execute(processes, tmp_path / "page", ["doctor", tmp_path])
    assert (code, errors) == (0, "")
    titles = [line.split("  ")[0] for line in printed.splitlines() if line[:1].isalpha()]
    assert titles[:8] == [
        "Versions", "Extras", "Cores", "Threads", "CPU speed", "Accelerator", "Memory", "Disk"
    ]  # fmt: skip
    code, text, _ = cli_process.execute(processes, tmp_path / "data", ["doctor", tmp_path, "--json"])
    found = json.loads(text)
    assert code == 0 and found["mount"]["path"] == str(tmp_path)
    for name, version in found["versions"].items():
        assert version is None or f"{name} {version}" in printed
    assert f"{found['cores']['affinity']} of {found['cores']['machine']}" in printed
    assert all(set(finding) == {"what", "why", "fix"} for finding in found["findings"])
