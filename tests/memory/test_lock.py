import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from headrace.errors import UserError
from headrace.memory.lock import DirectoryLock

HOLD = """
import os, sys, time
from pathlib import Path
from headrace.memory.lock import DirectoryLock
with DirectoryLock(Path(sys.argv[1])):
    worker = os.fork() if sys.argv[2] == "fork" else None
    if worker != 0:
        print(worker, flush=True)
    time.sleep(60)
"""


def holder(run, forks="alone"):
    """A process that holds the lock of `run`, perhaps with a forked worker; returns it and the worker."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run), forks], stdout=subprocess.PIPE, text=True
    )
    worker = process.stdout.readline().strip()
    return process, worker


def test_a_second_run_is_refused_with_the_number_of_the_first(tmp_path):
    process, _ = holder(tmp_path)
    with process:
        for _ in range(2):
            with pytest.raises(UserError, match=f"by process {process.pid} on .*choose another out"):
                DirectoryLock(tmp_path).__enter__()
        process.kill()
    with DirectoryLock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_worker_that_outlives_its_run_does_not_hold_it(tmp_path):
    process, worker = holder(tmp_path, "fork")
    try:
        with process:
            process.kill()
            process.stdout.close()
        with DirectoryLock(tmp_path):
            pass
    finally:
        os.kill(int(worker), signal.SIGKILL)


def test_one_process_holds_a_directory_once(tmp_path):
    run = tmp_path / "new" / "run"
    with DirectoryLock(run):
        with (
            pytest.raises(UserError, match=f"this process \\({os.getpid()}\\)"),
            DirectoryLock(run / ".." / "run"),
        ):
            pass
        with DirectoryLock(tmp_path):
            pass
        process = subprocess.run(
            [sys.executable, "-c", HOLD, str(run), "alone"], capture_output=True, text=True
        )
        assert f"by process {os.getpid()} on" in process.stderr
    with DirectoryLock(run):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available"), DirectoryLock(tmp_path):
        pass


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    with DirectoryLock(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    with DirectoryLock(tmp_path / "old"):
        pass
    assert list((tmp_path / "old").iterdir()) == []
    with DirectoryLock(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "plan.yaml").touch()
    assert sorted(path.name for path in (tmp_path / "new" / "run").iterdir()) == [".lock", "plan.yaml"]


def test_a_lock_that_is_taken_away_never_lets_two_in(tmp_path):
    """Two processes enter and leave the same new directory again and again, each taking its lock away."""
    code = (
        "import sys; from pathlib import Path; from headrace.memory.lock import DirectoryLock\n"
        "from headrace.errors import UserError\n"
        "run, mark, entered = Path(sys.argv[1]), Path(sys.argv[2]), 0\n"
        "while entered < 300:\n"
        "    try:\n"
        "        with DirectoryLock(run):\n"
        "            mark.open('x').close(); mark.unlink(); entered += 1\n"
        "    except UserError: pass\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "mark")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=300)[1] for process in processes] == ["", ""]
