import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import checkpoint_example as example
import pytest
import safetensors.torch
import torch

from headrace.checkpoint.directory import clean_leftovers, list_checkpoints
from headrace.checkpoint.restore import find_checkpoint
from headrace.checkpoint.save import save_checkpoint
from headrace.errors import RunStopped


def test_what_was_saved_comes_back(tmp_path):
    path = example.save(tmp_path / "new" / "run", 3)
    assert sorted(file.name for file in path.iterdir()) == example.FILES
    checkpoint = find_checkpoint(path.parent)
    assert (checkpoint.path, checkpoint.step) == (path, 3)
    assert set(checkpoint.tables) == {"master", "exp_avg"}
    assert sorted(checkpoint.names("master")) == sorted(example.SHAPES)
    example.check(checkpoint)


def test_other_programs_read_the_tables(tmp_path):
    tables = safetensors.torch.load_file(example.save(tmp_path, 1) / "master.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tables.items()} == example.SHAPES


def test_all_is_on_the_disk_before_the_name_and_the_name_before_the_removal(tmp_path, monkeypatch):
    example.save(tmp_path, 1)
    events, rename = [], os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append((str(a), str(b))), rename(a, b)))
    example.save(tmp_path, 2)
    aside, gone = (str(tmp_path / f".checkpoint-{name}-{os.getpid()}") for name in ("2.saving", "1.removing"))
    published, removed = (aside, str(tmp_path / "checkpoint-2")), (str(tmp_path / "checkpoint-1"), gone)
    at = events.index(published)
    assert set(events[:at]) == {aside, *(f"{aside}/{name}" for name in example.FILES)}
    assert events[at - 1] == aside
    assert events[at + 1 :] == [str(tmp_path), removed, str(tmp_path)]


def test_a_complete_checkpoint_of_the_same_step_stands(tmp_path):
    path = example.save(tmp_path, 5)
    before = path.stat().st_ino
    assert example.save(tmp_path, 5) == path
    assert path.stat().st_ino == before and [path] == list(tmp_path.iterdir())


def test_a_damaged_one_of_the_same_step_is_set_aside(tmp_path):
    for number in ("", "-2"):
        path = example.save(tmp_path, 5)
        os.truncate(path / "master.safetensors", 100)
        example.save(tmp_path, 5)
        example.check(find_checkpoint(tmp_path))
        assert (tmp_path / f"checkpoint-5.set-aside{number}" / "master.safetensors").stat().st_size == 100


def test_later_checkpoints_must_have_been_left_behind(tmp_path):
    example.save(tmp_path, 5)
    with pytest.raises(AssertionError):
        example.save(tmp_path, 4)


def full_at(call):
    """An os.fsync that finds the disk full at its `call`-th call from now on."""
    calls, fsync = iter(range(1, 1000)), os.fsync

    def full(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    return full


@pytest.mark.parametrize("call", range(1, 6))
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(tmp_path, monkeypatch, call):
    path = example.save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_at(call))
        with pytest.raises(RunStopped, match=r"checkpoint-2 .*checkpoint-1 stands as before"):
            example.save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [path]
    example.check(find_checkpoint(tmp_path))
    example.save(tmp_path, 2)
    example.check(find_checkpoint(tmp_path))


def test_a_write_beyond_the_limit_leaves_the_previous_checkpoint(tmp_path):
    path = example.save(tmp_path, 1)
    big = {"master": [example.entry("weight", torch.zeros(10_000))]}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunStopped, match="File too large"):
            save_checkpoint(tmp_path, 2, big, {}, environment=example.ENVIRONMENT, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [path]


FULL = """
import os, sys
from pathlib import Path
import checkpoint_example as example
run = Path(sys.argv[1])
example.save(run, 1)
(run / "ballast").write_bytes(bytes(900 << 10))
try:
    example.SHAPES["embed.weight"] = (100, 1000)
    example.save(run, 2)
except RuntimeError as error:
    print(error, sorted(os.listdir(run)))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare of util-linux is not here")
def test_a_really_full_disk_leaves_the_previous_checkpoint(tmp_path):
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk of its own")
    command = [*mount, sys.executable, "-c", FULL, str(tmp_path)]
    paths = {**os.environ, "PYTHONPATH": str(Path(example.__file__).parent)}
    done = subprocess.run(command, env=paths, capture_output=True, text=True)
    assert "No space left on device" in done.stdout, done
    assert "checkpoint-1 stands as before, make room and go on ['ballast', 'checkpoint-1']" in done.stdout


def test_an_interrupted_save_leaves_nothing(tmp_path):
    def pieces():
        raise KeyboardInterrupt

    tables = {"master": [example.Entry("weight", torch.float32, (3,), pieces)]}
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, tables, {}, environment=example.ENVIRONMENT, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_the_dead_go_and_of_the_living_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    works, pids = ("saving", "removing"), (dead.pid, os.getpid())
    gone = [f".checkpoint-3.{work}-{pid}" for work in works for pid in pids]
    stay = [f".checkpoint-3.saving-{os.getppid()}", ".checkpoint-3.saving", "checkpoint-3.set-aside"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "master.safetensors").touch()
    assert sorted(path.name for path in clean_leftovers(tmp_path)) == sorted(gone)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)


def test_only_exact_names_are_checkpoints(tmp_path):
    for name in ("0", "12", "9", "012", "", "1.old", "-3", "3a"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    assert list(list_checkpoints(tmp_path)) == [0, 9, 12]
    assert list_checkpoints(tmp_path / "not there") == {}


def test_saving_takes_no_memory_beside_a_piece(tmp_path, peak_memory):
    tensor = torch.ones(2**24)
    pieces = example.Entry("weight", torch.float32, (2**24,), lambda: tensor.split(2**18))
    tables = {"master": [pieces]}
    rise = peak_memory(
        lambda: save_checkpoint(tmp_path, 1, tables, {}, environment=example.ENVIRONMENT, keep=1)
    )
    assert rise < 8 << 20
