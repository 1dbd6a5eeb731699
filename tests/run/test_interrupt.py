"""Ctrl-C: once, a checkpoint and how to go on; twice, the end at once. No bit is lost either way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import cli_process
import early
import evidence
import pressing
import pytest

from headrace.run.interrupt import Interruption
from headrace.run.train import train

NOTICE = "Ctrl-C: saving after this step; once more stops at once"


@pytest.fixture
def press(processes, tmp_path):
    """`headrace train` with Ctrl-C at moments like `backward:6`; returns exit code, output and errors."""

    def train_with(moments, path):
        output, arguments = tmp_path / "printed", ["train", path]
        return cli_process.execute(processes, output, arguments, pressing.parse(moments))

    return train_with


def press_for_real(moments, path):
    """As `press`, in a process that ends as every command does: no thread under way may abort it."""
    command = [sys.executable, str(Path(pressing.__file__)), moments, "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=cli_process.TIMEOUT)
    return done.returncode, done.stdout, done.stderr


def check_continuation(write_run, path, capsys, first_line):
    """Gone on with, the run ends like one that nobody stopped."""
    whole = write_run("whole", checkpoint__every=3)
    train(whole)
    capsys.readouterr()
    train(path)
    assert capsys.readouterr().out.startswith(first_line)
    assert evidence.all_of(path) == evidence.all_of(whole)


def test_once_saves_and_says_how_to_go_on(write_run, capsys):
    path = write_run("stopped", checkpoint__every=3)
    code, printed, errors = press_for_real("backward:7", path)  # of step 4, the second micro-batch
    assert code == 130
    assert printed.endswith("stopped after step 4: the same command goes on from there\n")
    assert errors.endswith(f"{NOTICE}\nheadrace: stopped\n")
    assert evidence.steps(path) == [3, 4]
    assert not (evidence.home(path) / "model").exists()
    check_continuation(write_run, path, capsys, f"resumed at step 4 from {evidence.checkpoint(path, 4)} ")


def test_twice_stops_at_once(write_run, capsys):
    path = write_run("stopped", checkpoint__every=3)
    code, printed, errors = press_for_real("backward:6,backward:7", path)
    assert code == 130
    assert "stopped after step" not in printed
    assert errors.endswith(f"{NOTICE}\nheadrace: stopped\n")
    assert evidence.steps(path) == [3]
    assert [record["step"] for record in evidence.metrics(path)] == [1, 2, 3]
    check_continuation(write_run, path, capsys, f"resumed at step 3 from {evidence.checkpoint(path, 3)} ")


def test_a_second_one_inside_the_save_leaves_nothing_half_written(write_run, press, capsys):
    path = write_run("stopped", checkpoint__every=3)
    code, _, errors = press("backward:7,save:4", path)  # the second table of the second checkpoint
    assert code == 130 and errors.endswith("headrace: stopped\n") and "Traceback" not in errors
    assert evidence.steps(path) == [3]
    assert not list(evidence.home(path).glob(".checkpoint-*"))
    check_continuation(write_run, path, capsys, f"resumed at step 3 from {evidence.checkpoint(path, 3)} ")


def test_before_the_first_step_it_stops_at_once(write_run, press):
    path = write_run()
    code, printed, errors = press("load:0", path)
    assert code == 130 and errors.endswith("headrace: stopped\n") and "Traceback" not in errors
    assert evidence.steps(path) == [] and "step 1" not in printed


@pytest.mark.parametrize("moment", ["backward:15", "save:11"])
def test_in_the_last_step_the_run_ends_as_it_would(write_run, press, moment):
    """Nothing is left to stop: in the second micro-batch of step 8, in the last table of its checkpoint."""
    path = write_run()
    code, printed, errors = press(moment, path)
    assert (code, "stopped" in printed) == (0, False)
    assert NOTICE in errors
    assert evidence.steps(path) == [6, 8] and (evidence.home(path) / "model").is_dir()
    assert "Done: 8 steps" in printed


def test_while_the_model_is_written_the_same_command_writes_it(write_run, press, capsys):
    path = write_run("stopped", checkpoint__every=3)
    code, _, errors = press("closing:0", path)
    assert code == 130 and errors.endswith("headrace: stopped\n") and "Traceback" not in errors
    assert evidence.steps(path) == [6, 8]
    check_continuation(write_run, path, capsys, f"resumed at step 8 from {evidence.checkpoint(path, 8)} ")


# -- before training ---------------------------------------------------------------------------------------


def press_early(moment, *arguments):
    """The command line, with Ctrl-C as a module is imported, or where the exception is lost."""
    command = [sys.executable, str(Path(early.__file__)), moment, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=cli_process.TIMEOUT)
    return done.returncode, done.stdout, done.stderr.strip()


@pytest.mark.parametrize("module", ["typer", "pydantic", "torch", "transformers", "datasets"])
def test_while_modules_are_imported_it_ends_at_once(write_run, module):
    path = write_run()
    assert press_early(module, "train", path) == (130, "", "headrace: stopped")
    assert not list(evidence.home(path).glob("*"))


@pytest.mark.parametrize("command", ["plan", "train", "show", "data"])
def test_every_command_ends_with_a_sentence(write_run, command):
    path = write_run()
    code, _, errors = press_early("pathlib.Path", command, path)
    assert (code, errors) == (130, "headrace: stopped")


def test_one_that_python_loses_stops_before_the_first_step(write_run):
    path = write_run()
    code, printed, errors = press_early("lost", "train", path)
    assert code == 130 and errors.endswith("headrace: stopped")
    assert "step 1" not in printed and evidence.steps(path) == []


def test_sigterm_in_training_is_a_ctrl_c(capfd):
    """Schedulers and containers send it before they kill."""
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: saving after this step; once more stops at once" in capfd.readouterr().err
