"""A run with `report: [wandb]`, killed and resumed: one run of W&B with the numbers of metrics.jsonl."""

import os
import signal
import sys
from pathlib import Path

import deadly
import evidence
import pytest

pytest.importorskip("wandb")
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import wandb_log

TIMEOUT = 120


def train_offline(path, *moment):
    """What the process does: W&B reads its variables once, at its import."""
    os.environ["WANDB_MODE"] = "offline"
    deadly.run(path, (), *moment)


def execute(processes, *arguments):
    process = processes.Process(target=train_offline, args=arguments)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def numbers(record):
    """What W&B gets of a record, without what the machine's load decides."""
    return {key: value for key, value in record.items() if isinstance(value, int | float)}


def logged(log):
    rows = wandb_log.history(log)
    return [
        {key: value for key, value in row.items() if key.split("/")[0] not in evidence.TIMES} for row in rows
    ]


def test_killed_and_resumed_it_is_one_run_with_the_numbers_of_the_metrics(processes, write_run):
    path = write_run(report=["wandb"])
    assert execute(processes, path, "backward", 9, 0.0) == -signal.SIGKILL  # in step 5, after checkpoint 4
    assert execute(processes, path) == 0
    logs = sorted(evidence.home(path).glob("wandb/*run-*/*.wandb"), key=lambda log: log.parent.name)
    assert len({log.name for log in logs}) == 1
    resumed = logs[-1]
    assert logged(resumed) == [numbers(record) for record in evidence.metrics(path)]
    settings = wandb_log.settings(resumed)
    assert settings["train"]["steps"] == 8 and settings["threads"]["update"] == 2
