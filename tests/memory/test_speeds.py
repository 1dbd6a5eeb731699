"""Shares of paths follow what the paths do."""

from pathlib import Path

import pytest

from headrace.memory.blocks import BLOCK
from headrace.memory.speeds import PathSpeeds

PATHS = [Path("/a"), Path("/b")]


def move(speeds, path, megabytes_a_second, times=1):
    for _ in range(times):
        for direction in ("read", "write"):
            speeds.note(path, direction, BLOCK, BLOCK / (megabytes_a_second * 1e6))


def test_shares_follow_a_change_and_leave_noise_alone():
    speeds = PathSpeeds(PATHS, [3.0, 1.0])
    assert speeds.shares == [0.75, 0.25]
    speeds.follow()
    assert speeds.shares == [0.75, 0.25], "nothing was measured"
    move(speeds, 0, 310)
    move(speeds, 1, 100)
    speeds.follow()
    assert speeds.shares == [0.75, 0.25]
    move(speeds, 1, 300, times=50)
    speeds.follow()
    assert speeds.shares == pytest.approx([0.508, 0.492], abs=0.001)


def test_small_transfers_say_nothing():
    speeds = PathSpeeds(PATHS, [1.0, 1.0])
    for path in (0, 1):
        for direction in ("read", "write"):
            speeds.note(path, direction, BLOCK - 1, 1.0 + path)
    speeds.follow()
    assert speeds.shares == [0.5, 0.5]


def test_a_path_that_became_slow_is_named_once():
    speeds = PathSpeeds(PATHS, [1.0, 1.0])
    for path in (0, 1):
        move(speeds, path, 1000)
    speeds.follow()
    move(speeds, 1, 10, times=50)
    with pytest.warns(UserWarning, match="/b moves .* MB a second, where it moved 500 before") as warned:
        speeds.follow()
        speeds.follow()
    assert len(warned) == 1
    assert speeds.shares[1] < 0.02
