"""Killed with SIGKILL at any instant and resumed, a run ends with the bits of one that was never killed."""

import random
import signal
import sys
from pathlib import Path

import pytest

from headrace.memory.tensorfile import sha256_of

sys.path.insert(0, str(Path(__file__).parent))
import deadly

TIMEOUT = 120
LONGEST = {"backward": 0.02, "update": 0.02, "save": 0.06, "publish": 0.02}  # seconds of a phase, about


def execute(processes, *arguments):
    """Run in a process of its own; returns its exit code."""
    process = processes.Process(target=deadly.run, args=arguments)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def weights(path):
    return sha256_of(Path(path).with_suffix("") / "model" / "model.safetensors")


def last_states(path):
    checkpoint = max(Path(path).with_suffix("").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    return {file.name: sha256_of(file) for file in sorted(checkpoint.glob("*.safetensors"))}


def check_kills(processes, write_run, seed, rounds, kills):
    chance = random.Random(seed)
    whole = write_run("whole")
    assert execute(processes, whole) == 0
    died = 0
    for number in range(rounds):
        killed = write_run(f"killed{number}")
        for _ in range(kills):
            phase = chance.choice(deadly.PHASES)
            moment = (chance.randrange(4), chance.uniform(0, LONGEST[phase]))
            died += execute(processes, killed, (), phase, *moment) == -signal.SIGKILL
        assert execute(processes, killed) == 0
        assert weights(killed) == weights(whole)
        assert last_states(killed) == last_states(whole)
    return died


def test_a_few_kills(processes, write_run):
    assert check_kills(processes, write_run, seed=1, rounds=1, kills=3) >= 2


@pytest.mark.slow
def test_thirty_kills(processes, write_run):
    died = check_kills(processes, write_run, seed=2, rounds=16, kills=4)
    print(f"{died} SIGKILLs, 16 runs, all equal bit for bit")
    assert died >= 30


def test_metrics_have_every_step_once_after_a_kill(processes, write_run):
    from headrace.training.metrics import read_metrics

    whole, killed = write_run("whole"), write_run("killed")
    assert execute(processes, whole) == 0
    assert execute(processes, killed, (), "backward", 9, 0.0) == -signal.SIGKILL
    assert execute(processes, killed) == 0
    records = [read_metrics(path.with_suffix("") / "metrics.jsonl") for path in (whole, killed)]
    changing = {"seconds", "stall", "held"}
    kept = [[{k: v for k, v in r.items() if k not in changing} for r in rows] for rows in records]
    assert kept[0] == kept[1]
    assert [r["step"] for r in records[0]] == list(range(1, 9))


def test_changed_memory_and_bucket_on_resume(processes, write_run):
    """Memory and checkpoint settings are free to change, and change no bit."""
    whole, changed = write_run("whole"), write_run("changed")
    assert execute(processes, whole) == 0
    assert execute(processes, changed, (), "backward", 9, 0.0) == -signal.SIGKILL
    new = ["memory.activations=keep", "memory.host=3GiB", "checkpoint.every=3"]
    assert execute(processes, changed, new) == 0
    assert weights(changed) == weights(whole)
