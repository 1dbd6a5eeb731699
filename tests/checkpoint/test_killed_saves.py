"""SIGKILL at any instant of a save or of a removal: a complete checkpoint is always found."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_example as example
import pytest

from headrace.checkpoint.directory import clean_leftovers, list_checkpoints
from headrace.checkpoint.restore import find_checkpoint, open_checkpoint


@pytest.fixture(scope="module")
def victims():
    """A process that forks savers of checkpoints; see checkpoint_example."""
    program = [sys.executable, str(Path(example.__file__))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        yield server
        server.stdin.close()


def start(victims, run, first=1, keep=1, kill_at=None):
    """Begin a saver: see checkpoint_example.save_until_killed."""
    victims.stdin.write(json.dumps([str(run), first, keep, kill_at]) + "\n")
    victims.stdin.flush()


def hear(victims):
    word, number = victims.stdout.readline().strip().rsplit("-", 1)
    return word, int(number)


def hear_all(victims):
    """Everything a saver says until its end, by word; the last number of each."""
    heard = {}
    while "ended" not in heard:
        heard.update([hear(victims)])
    return heard


def kill_at_random(victims, run, first, keep, rng):
    """Kill a saver at a random instant of some saves; returns the last step that it had finished."""
    start(victims, run, first, keep)
    heard = dict([hear(victims)])
    began = time.perf_counter()
    heard.update([hear(victims)])
    time.sleep(rng.uniform(0, 4) * (time.perf_counter() - began))
    os.kill(heard["child"], signal.SIGKILL)
    heard |= hear_all(victims)
    assert heard["ended"] == signal.SIGKILL
    return heard["checkpoint"]


def check_after_kill(run, finished):
    """Nothing that was finished is lost, nothing torn bears a checkpoint's name, and no rest stays."""
    checkpoint = find_checkpoint(run)
    assert checkpoint.step >= finished
    for path in list_checkpoints(run).values():
        example.check(open_checkpoint(path))
    clean_leftovers(run)
    assert example.hidden(run) == []
    return checkpoint.step


def killed_again_and_again(victims, run, kills, keep):
    rng, step = random.Random(kills), 0
    for _ in range(kills):
        step = check_after_kill(run, kill_at_random(victims, run, step + 1, keep, rng))
    example.save(run, step + 1, keep)
    assert list(list_checkpoints(run))[-1] == step + 1 and len(list_checkpoints(run)) == min(keep, step + 1)


def killed_at_line(victims, run, line):
    """Kill at one line of the second save; returns how many lines there were if it was past the end."""
    start(victims, run, kill_at=line)
    heard = hear_all(victims)
    assert ("lines" in heard) == (heard["ended"] == 0)
    check_after_kill(run, heard["checkpoint"])
    return heard.get("lines")


def test_random_kills(victims, tmp_path):
    killed_again_and_again(victims, tmp_path, kills=6, keep=1)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_many_random_kills(victims, tmp_path, keep):
    killed_again_and_again(victims, tmp_path, kills=40, keep=keep)


def test_kills_at_some_lines(victims, tmp_path):
    lines = killed_at_line(victims, tmp_path / "whole", -1)
    for line in random.Random(0).sample(range(1, lines + 1), 12):
        assert killed_at_line(victims, tmp_path / str(line), line) is None


@pytest.mark.slow
def test_kills_at_every_line(victims, tmp_path):
    lines = killed_at_line(victims, tmp_path / "whole", -1)
    for line in range(1, lines + 1):
        assert killed_at_line(victims, tmp_path / str(line), line) is None
