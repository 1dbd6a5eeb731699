"""Checkpoints as told of in public reports: lost moments, torn files, full disks, changed settings."""

import errno
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import cli_process
import evidence
import numpy as np
import pytest

from headrace.errors import RunStopped, UserError
from headrace.optim.config import OptimConfig
from headrace.run import train as train_module
from headrace.run.train import train
from headrace.training.lr import learning_rate

NEVER_ENDING = 100_000  # steps


# -- what a resumed run goes on with -----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_resume_keeps_counts_moments_rate_and_schedule(write_run, capsys, schedule):
    """Eight steps at once, and the last four of them again from the checkpoint of step 4."""
    path = write_run(optim__schedule=schedule, optim__warmup=2, checkpoint__every=4)
    train(path)
    whole, later = evidence.all_of(path), evidence.states(path, 8)
    half = evidence.states(path, 4)
    assert set(evidence.state(path, 4)["counts"].values()) == {4}
    assert not set(half.values()) & set(later.values()), "every table must have moved"
    capsys.readouterr()
    train(path, ["checkpoint.resume=4"])
    assert capsys.readouterr().out.startswith(f"resumed at step 4 from {evidence.checkpoint(path, 4)} · ")
    assert set(evidence.state(path, 8)["counts"].values()) == {8}
    assert evidence.all_of(path) == whole
    rates = OptimConfig(lr=1e-2, schedule=schedule, warmup=2)
    assert [r["lr"] for r in evidence.metrics(path)] == [learning_rate(i, 8, rates) for i in range(8)]


def test_resume_goes_on_with_the_same_random_numbers(write_run):
    path = write_run(checkpoint__every=4)
    train(path)
    whole = evidence.state(path, 8)["rng"]
    random.seed(99)
    np.random.seed(99)
    train(path, ["checkpoint.resume=4"])
    assert evidence.state(path, 8)["rng"] == whole


def test_a_run_may_go_on_twice_and_past_its_first_length(write_run):
    """Without a schedule the rate does not ask for the number of steps: 2 + 4 + 2 are 8."""
    constant = {"optim__schedule": "constant", "optim__warmup": 0}
    whole, parts = write_run("whole", **constant), write_run("parts", **constant)
    train(whole, ["train.eval_every=8"])
    for steps in (2, 6, 8):
        train(parts, [f"train.steps={steps}", "train.eval_every=8"])
    assert evidence.weights(parts) == evidence.weights(whole)
    assert evidence.states(parts) == evidence.states(whole)
    losses = [[record["loss"] for record in evidence.metrics(path)] for path in (whole, parts)]
    assert losses[0] == losses[1]


# -- damage ------------------------------------------------------------------------------------------------


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name", "what"),
    [
        (truncate, "master.safetensors", r"has \d+ bytes instead of \d+"),
        (flip_a_bit, "exp_avg_sq.safetensors", "was altered"),
        (flip_a_bit, "state.json", "was altered"),
        (Path.unlink, "manifest.json", "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(write_run, capsys, damage, name, what):
    path = write_run()
    train(path)
    whole, last = evidence.all_of(path), evidence.checkpoint(path, 8)
    damage(last / name)
    damaged = {file.name: file.read_bytes() for file in last.iterdir()}
    capsys.readouterr()
    train(path)
    printed = capsys.readouterr().out
    assert re.search(rf"^! {last / name} {what}.*; checkpoint-8 is passed over$", printed, re.MULTILINE)
    assert f"resumed at step 6 from {evidence.checkpoint(path, 6)}" in printed
    assert evidence.all_of(path) == whole
    aside = evidence.home(path) / "checkpoint-8.set-aside"
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == damaged
    assert f"set aside as {aside.name}" in printed


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(write_run):
    path = write_run()
    train(path)
    for step in evidence.steps(path):
        truncate(evidence.checkpoint(path, step) / "master.safetensors")
    before = sorted(file.name for file in evidence.home(path).iterdir())
    with pytest.raises(UserError, match=r"no checkpoint in .* is complete .*checkpoint\.resume=never"):
        train(path)
    assert sorted(file.name for file in evidence.home(path).iterdir()) == before


# -- a full disk -------------------------------------------------------------------------------------------


@contextmanager
def full_at_save(number, nbytes):
    """Inside, the system refuses to write more than some bytes of a file in the n-th save of a run."""
    limits, save, saves = resource.getrlimit(resource.RLIMIT_FSIZE), train_module.save_checkpoint, count(1)

    def limited(*arguments, **options):
        if next(saves) == number:
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
        try:
            return save(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "save_checkpoint", limited)
        yield


@pytest.mark.parametrize("nbytes", [0, 3_000, 100_000])
def test_a_save_that_does_not_fit_leaves_the_checkpoint_before_it(write_run, nbytes):
    whole, path = write_run("whole"), write_run("short")
    train(whole)
    sentence = r"checkpoint-6 could not be written .*checkpoint-4 stands as before, make room and go on"
    with full_at_save(3, nbytes), pytest.raises(RunStopped, match=sentence):
        train(path)
    assert evidence.steps(path) == [2, 4]
    assert not list(evidence.home(path).glob(".checkpoint-*"))
    train(path)
    assert evidence.all_of(path) == evidence.all_of(whole)


ON_A_SMALL_DISK = """
import shutil, sys
from pathlib import Path
from headrace.run import train as train_module
run, save = Path(sys.argv[1]), train_module.save_checkpoint

def fill_and_save(home, step, *arguments, **options):
    if step == 6:
        (home / "ballast").write_bytes(bytes(shutil.disk_usage(home).free - (100 << 10)))
    return save(home, step, *arguments, **options)

train_module.save_checkpoint = fill_and_save
try:
    train_module.train(run)
except RuntimeError as error:
    print(error)
train_module.save_checkpoint = save
home = Path(sys.argv[2])
print(*sorted(path.name for path in home.glob("*checkpoint*")))
(home / "ballast").unlink()
print(train_module.train(run))
shutil.copytree(home, sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare of util-linux is not here")
def test_a_really_full_disk_leaves_the_checkpoint_before_it(write_run, tmp_path):
    whole, path = write_run("whole"), write_run("small")
    train(whole)
    home = evidence.home(path)
    home.mkdir()
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"', str(home)]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk of its own")
    command = [*mount, sys.executable, "-c", ON_A_SMALL_DISK, str(path), str(home), str(tmp_path / "kept")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done
    full = os.strerror(errno.ENOSPC)
    assert re.search(
        rf"checkpoint-6 could not be written .*{full}.*checkpoint-4 stands as before", done.stdout
    )
    assert "checkpoint-2 checkpoint-4\n" in done.stdout, done.stdout
    assert evidence.all_of(tmp_path / "kept") == evidence.all_of(whole)


# -- settings ----------------------------------------------------------------------------------------------


def test_changed_settings_are_refused_from_old_to_new_or_accepted_aloud(write_run, capsys):
    path = write_run()
    train(path)
    before = evidence.all_of(path)
    changes = r"\(train\.seed: 0 -> 3; optim\.lr: 0\.01 -> 0\.02\).*checkpoint\.accept_changes=true"
    with pytest.raises(UserError, match=changes):
        train(path, ["optim.lr=2e-2", "train.seed=3", "train.steps=10"])
    assert evidence.all_of(path) == before
    capsys.readouterr()
    train(path, ["optim.lr=2e-2", "train.steps=10", "checkpoint.accept_changes=true"])
    assert "! going on with a changed setting: optim.lr: 0.01 -> 0.02\n" in capsys.readouterr().out
    rates = [record["lr"] for record in evidence.metrics(path)]
    assert rates[8:] == [learning_rate(step, 10, OptimConfig(lr=2e-2)) for step in (8, 9)]


def test_settings_that_make_no_other_run_are_free(write_run, tmp_path):
    """Length, memory, checkpoints and reports; the directory may be moved."""
    path = write_run()
    train(path)
    moved = tmp_path / "moved"
    evidence.home(path).rename(moved)
    free = ["train.steps=10", "memory.host=3GiB", "memory.activations=keep", "checkpoint.every=1"]
    train(path, [*free, "checkpoint.keep=1", f"out={moved}"])
    assert evidence.steps(moved) == [10]
    assert [record["step"] for record in evidence.metrics(moved)] == list(range(1, 11))


def test_changed_training_data_is_refused_or_accepted_aloud(write_run, tiny, tmp_path, capsys):
    data = tmp_path / "chats.jsonl"
    shutil.copy(tiny / "chats.jsonl", data)
    path = write_run(data__train=str(data))
    train(path)
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(UserError, match=r"the data is not what .*checkpoint-6 was trained on"):
        train(path, ["checkpoint.resume=6"])
    assert evidence.steps(path) == [6, 8], "what is refused sets nothing aside"
    capsys.readouterr()
    train(path, ["checkpoint.resume=6", "checkpoint.accept_changes=true"])
    assert re.search(
        r"^! going on with other data than .*checkpoint-6", capsys.readouterr().out, re.MULTILINE
    )


def test_checkpoints_without_their_plan_are_not_gone_on_from(write_run):
    path = write_run()
    train(path)
    (evidence.home(path) / "plan.yaml").unlink()
    with pytest.raises(UserError, match=r"its plan\.yaml is missing.*checkpoint\.resume=never"):
        train(path)


# -- one run, once -----------------------------------------------------------------------------------------


def test_a_finished_run_says_so_and_touches_nothing(write_run, capsys):
    path = write_run()
    model = train(path)
    before = {
        file: file.stat().st_mtime_ns for file in evidence.home(path).rglob("*") if file.name != ".lock"
    }
    capsys.readouterr()
    assert train(path) == model
    assert capsys.readouterr().out == f"already finished: 8 steps done · {model}\n"
    after = {file: file.stat().st_mtime_ns for file in evidence.home(path).rglob("*") if file.name != ".lock"}
    assert after == before


def test_a_finished_run_without_its_model_writes_it_again(write_run):
    path = write_run()
    train(path)
    before = evidence.all_of(path)
    shutil.rmtree(evidence.home(path) / "model")
    train(path)
    assert evidence.all_of(path) == before


def test_a_second_run_in_the_same_out_is_refused(write_run, processes, tmp_path):
    path = write_run(train__steps=NEVER_ENDING)
    first = processes.Process(target=cli_process.run, args=(["train", str(path)], tmp_path / "first"))
    first.start()
    try:
        wait_for(evidence.home(path) / "metrics.jsonl", first)
        with pytest.raises(UserError, match=rf"is going on, by process {first.pid} on .*choose another out"):
            train(path, ["train.steps=1"])
        assert first.is_alive()
    finally:
        first.kill()
        first.join()
    train(path, ["train.steps=2", "checkpoint.resume=never"])


def wait_for(file, process):
    while not file.exists():
        assert process.is_alive(), "the run ended"
        time.sleep(0.02)
