"""The measurement writes what it says and leaves nothing."""

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.memory import blocks, disk_speed
from headrace.memory.disk_speed import measure

MIB = 2**20


def test_it_measures_and_leaves_nothing(tmp_path: Path) -> None:
    speed = measure(tmp_path, 16 * MIB)
    assert speed is not None and speed.write > 0 and speed.read > 0
    assert not list(tmp_path.iterdir())


def test_it_works_without_direct_access_and_vectored_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_DIRECT", 0)
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.delattr(os, "pwritev", raising=False)
    speed = measure(tmp_path, 8 * MIB)
    assert speed is not None and not speed.direct and speed.read > 0
    assert not list(tmp_path.iterdir())


def test_it_writes_no_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    original = blocks.write_at

    def counted(*given: Any) -> int:
        written.append(original(*given))
        return written[-1]

    monkeypatch.setattr(blocks, "write_at", counted)
    assert measure(tmp_path, 13 * MIB)
    assert sum(written) <= 13 * MIB and written


def test_a_slow_disk_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    original = blocks.write_at
    monkeypatch.setattr(disk_speed, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(blocks, "write_at", lambda *given: written.append(original(*given)) or written[-1])
    speed = measure(tmp_path, 64 * MIB)
    assert speed is not None and speed.write > 0
    assert written == [4 * MIB]


def test_without_room_or_without_the_right_to_write_there_is_no_measurement(tmp_path: Path) -> None:
    assert measure(tmp_path, 1 * MIB) is None
    assert measure(tmp_path / "nowhere") is None
    assert not list(tmp_path.iterdir())
