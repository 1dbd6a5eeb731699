"""Machines: presets, and what is found out about this one."""

import os
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.machine import detect
from headrace.machine.machine import Machine
from headrace.machine.presets import PRESETS, preset

GIB = 2**30


def test_a_machine_with_a_card_has_two_tiers_and_one_without_has_one() -> None:
    card = Machine("card", 4, {"device": 8 * GIB, "host": 64 * GIB, "disk": GIB})
    plain = Machine("plain", 4, {"ram": 16 * GIB})
    assert (card.unified, card.device_tier, card.host_tier) == (False, "device", "host")
    assert (plain.unified, plain.device_tier, plain.host_tier) == (True, "ram", "ram")


@pytest.mark.parametrize("tiers", [{"device": 1}, {"ram": 1, "host": 1}, {"disk": 1}])
def test_other_tiers_are_no_machine(tiers: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        Machine("odd", 1, tiers)


def test_a_machine_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["card-8gb"].tiers["device"] = 0  # type: ignore[index]


def test_presets_hold_less_than_is_printed_on_the_box() -> None:
    assert {f"card-{n}gb" for n in (8, 12, 16, 24, 32)} <= PRESETS.keys()
    assert preset("card-24gb").tiers["device"] == int(23.5 * GIB)
    assert preset("laptop-16gb").unified


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="the machine 'card-9gb' is not known: choose one of card-8gb, "):
        preset("card-9gb")


def test_this_machine() -> None:
    machine = detect.detect(path=Path("/does/not/exist/yet"))
    assert machine.unified and machine.cores <= (os.cpu_count() or 1)
    assert machine.tiers["ram"] > 0 and machine.tiers["disk"] > 0
    assert set(detect.detect(device_bytes=8 * GIB).tiers) == {"device", "host"}


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_DOT_", ".")).write_text(text)


def test_every_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    _group(root / "outer", memory_DOT_max="1000\n", memory_DOT_current="700\n")
    inner = {"memory_DOT_max": "max\n", "memory_DOT_current": "600\n"}
    _group(root / "outer" / "inner", **inner, memory_DOT_stat="anon 5\ninactive_file 200\n")
    (group,) = detect.cgroups(root, membership)
    assert (group.limit, group.free) == (1000, 300)


def test_caches_that_can_be_dropped_are_free(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("12:cpu,cpuacct:/a\n7:memory:/a\n0::/\n")
    files = {"memory_DOT_limit_in_bytes": "1000", "memory_DOT_usage_in_bytes": "900"}
    _group(root / "memory" / "a", **files, memory_DOT_stat="total_inactive_file 250\n")
    assert [group.free for group in detect.cgroups(root, membership)] == [350]


def test_a_path_of_the_host_falls_back_to_the_root(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/docker/0123456789\n")
    _group(root, memory_DOT_max="1000", memory_DOT_current="400")
    assert [group.free for group in detect.cgroups(root, membership)] == [600]


def test_without_cgroups_nothing_is_limited(tmp_path: Path) -> None:
    assert detect.cgroups(tmp_path, tmp_path / "missing") == []
