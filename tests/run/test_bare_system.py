"""Where POSIX's calls are missing, as on Windows and macOS, everything imports and a run goes through."""

import subprocess
import sys
from pathlib import Path

import evidence

import headrace


def test_a_run_and_its_resume_need_none_of_what_is_missing(write_run, tmp_path):
    whole, bare = write_run("whole"), write_run("bare")
    headrace.train(whole)
    command = [sys.executable, Path(__file__).with_name("bare_system.py"), bare, "6"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "! " in done.stdout and ".lock cannot be locked" in done.stdout, "what is missing is said"
    assert "fresh run" in done.stdout and "resumed at step 6" in done.stdout
    assert evidence.weights(bare) == evidence.weights(whole)
    assert evidence.states(bare) == evidence.states(whole)
