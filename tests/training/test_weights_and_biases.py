"""W&B gets the numbers of metrics.jsonl under one id over all sessions, and training never waits for it.

W&B reads its environment once in a process: every session here has a process of its own.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.training.metrics import read_metrics

pytest.importorskip("wandb")

import wandb_log

SESSION = """
import os, signal, sys, warnings
from pathlib import Path
from headrace.training import weights_and_biases
from headrace.training.metrics import Metrics

directory, done, first, last, seconds = sys.argv[1], *map(int, sys.argv[2:])
weights_and_biases._INIT_SECONDS = weights_and_biases._FINISH_SECONDS = seconds
warnings.showwarning = lambda message, *rest: print(message)
with Metrics(Path(directory), done, ["wandb"], {"optim": {"lr": 1e-5}}) as metrics:
    for step in range(first, last + 1):
        held = {"ram": 7 * step}
        norm = float("inf") if step == 2 else 0.5
        metrics.write({"step": step, "loss": 1 / step, "norm": norm, "held": held, "offender": "layers.0"})
    print("written while W&B was still at it:", metrics._boards[0]._thread.is_alive(), flush=True)
    if not seconds:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def session(directory: Path, done: int, first: int, last: int, seconds: int = 20, **environment: str) -> str:
    """Write steps from ``first`` to ``last`` and return what was printed, warnings included.

    W&B gets so many ``seconds`` for its start and its end; with 0 the process is killed after the last step.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    own |= {"HOME": str(directory.parent), "NETRC": str(directory.parent / "none"), **environment}
    command = [sys.executable, "-c", SESSION, str(directory), *map(str, (done, first, last, seconds))]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if seconds else -signal.SIGKILL), done.stderr
    return done.stdout


def logs(directory: Path) -> list[Path]:
    """W&B's files of every session, oldest first."""
    return sorted(directory.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def scalars(directory: Path) -> list[dict[str, Any]]:
    """The numbers in metrics.jsonl, nested names joined."""
    rows = []
    for record in read_metrics(directory / "metrics.jsonl"):
        held = {f"held/{tier}": nbytes for tier, nbytes in record.pop("held").items()}
        rows.append({k: v for k, v in record.items() if isinstance(v, int | float)} | held)
    return rows


def test_all_sessions_are_one_run_with_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    session(directory, 0, 1, 4, WANDB_MODE="offline")
    first = scalars(directory)
    session(directory, 2, 3, 5, WANDB_MODE="offline")
    before, after = logs(directory)
    assert wandb_log.history(before) == first
    assert wandb_log.history(after) == scalars(directory)[2:]
    assert "norm" not in first[1] and len(first) == 4
    assert wandb_log.run_ids(before) == wandb_log.run_ids(after)
    assert wandb_log.settings(before) == {"optim": {"lr": 1e-5}}


def test_what_a_kill_may_have_lost_is_sent_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    session(directory, 0, 1, 2, WANDB_MODE="offline")
    session(directory, 2, 3, 6, seconds=0, WANDB_MODE="offline")
    session(directory, 5, 6, 7, WANDB_MODE="offline")
    kept = scalars(directory)
    assert [row["step"] for row in kept] == [1, 2, 3, 4, 5, 6, 7]
    assert wandb_log.history(logs(directory)[0]) == kept[:2]
    assert wandb_log.history(logs(directory)[-1]) == kept[2:], "1 and 2 were there for certain"


def test_a_new_run_forgets_what_an_older_one_had_sent(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    session(directory, 0, 1, 4, WANDB_MODE="offline")
    session(directory, 0, 1, 3, seconds=0, WANDB_MODE="offline")
    session(directory, 2, 3, 3, WANDB_MODE="offline")
    assert wandb_log.history(logs(directory)[-1]) == scalars(directory)


def test_a_run_from_the_start_is_another_one(tmp_path: Path) -> None:
    for _ in range(2):
        session(tmp_path / "run", 0, 1, 1, WANDB_MODE="offline")
    ids = [wandb_log.run_ids(log) for log in logs(tmp_path / "run")]
    assert len(ids) == 2 and ids[0] != ids[1]


def test_without_a_key_the_run_is_kept_and_that_is_said(tmp_path: Path) -> None:
    printed = session(tmp_path / "run", 0, 1, 2)
    assert "W&B has no key here (wandb login): this run stays on the disk for wandb sync " in printed
    assert f"wandb sync {tmp_path / 'run' / 'wandb'}/offline-run-*\n" in printed
    assert wandb_log.history(logs(tmp_path / "run")[0]) == scalars(tmp_path / "run")


def test_disabled_is_disabled(tmp_path: Path) -> None:
    assert session(tmp_path / "run", 0, 1, 2, WANDB_MODE="disabled").count("\n") == 1
    assert logs(tmp_path / "run") == []


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of something that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_stops_nothing_and_loses_nothing(
    tmp_path: Path, silent_server: str
) -> None:
    key = {"WANDB_BASE_URL": silent_server, "WANDB_API_KEY": "0" * 40}
    printed = session(tmp_path / "run", 0, 1, 3, seconds=3, **key)
    assert "written while W&B was still at it: True" in printed
    assert "W&B does not answer (" in printed
    assert wandb_log.history(logs(tmp_path / "run")[-1]) == scalars(tmp_path / "run")


def test_a_failure_of_it_is_told_and_ends_nothing(tmp_path: Path) -> None:
    printed = session(tmp_path / "run", 0, 1, 3, WANDB_MODE="no such mode")
    assert "W&B failed (" in printed
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3]
