"""OffloadedAdamW in TRL's SFTTrainer: torch's numbers, and exact continuation after a kill."""

import json
import multiprocessing
import random
import signal
import time
from contextlib import suppress

import law_one
import pytest
import sft
import torch

from headrace import OffloadedAdamW, TrainerCallback

TIMEOUT = 300


def test_sft_trainer_gives_the_bits_of_torchs_adamw(tmp_path):
    ours, theirs = sft.make_model(torch.float32), sft.make_model(torch.float32)
    optimizer = sft.offloaded(ours)
    trainer = sft.make_trainer(tmp_path / "ours", ours, optimizer, [TrainerCallback(optimizer)])
    trainer.train()
    reference = law_one.clipping_adamw(theirs.parameters(), sft.CLIP, **sft.SETTINGS)
    sft.make_trainer(tmp_path / "theirs", theirs, reference, []).train()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == sft.STEPS and logs[-1]["loss"] < logs[0]["loss"]
    assert logs[-1]["grad_norm"] == optimizer.norm.value
    optimizer.close()


def test_trainer_builds_the_optimizer_itself(tmp_path):
    """With its own groups for weight decay, after it has put the model where it trains, and its clipping."""
    ours, theirs = sft.make_model(torch.float32), sft.make_model(torch.float32)
    options = {"max_grad_norm": sft.CLIP, "weight_decay": 0.1}
    built = (OffloadedAdamW, {"lr": 1e-2, "workers": 2})
    trainer = sft.make_trainer(tmp_path / "ours", ours, built, [TrainerCallback()], **options)
    trainer.train()
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    reference = (torch.optim.AdamW, {"lr": 1e-2, "fused": True})
    sft.make_trainer(tmp_path / "theirs", theirs, reference, [], **options).train()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    trainer.optimizer.optimizer.close()


def start(out, *arguments):
    """`sft.run` in a process of its own."""
    out.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl.trainer.sft_trainer", "headrace.training.callback"])
    process = context.Process(target=sft.run, args=(out, *arguments))
    process.start()
    return process


def execute(out, *arguments):
    """The same until its end; its exit code."""
    process = start(out, *arguments)
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the training hangs"
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directories of runs that were never killed, by whether they release gradients."""
    directories = {release: tmp_path_factory.mktemp(f"whole-{release}") for release in (True, False)}
    assert [execute(out, release) for release, out in directories.items()] == [0, 0]
    return directories


def assert_ended_alike(one, two):
    expected, found = torch.load(one / "result.pt"), torch.load(two / "result.pt")
    assert expected.keys() == found.keys() and any(name.startswith("master.") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("release", [True, False])
def test_killed_in_backward_and_resumed_it_ends_as_if_it_had_not_been(whole, tmp_path, release):
    """Killed in the fifth step's backward, when some gradients have left and the last checkpoint is at 4."""
    assert execute(tmp_path, release, 4) == -signal.SIGKILL
    assert (tmp_path / "checkpoint-4").is_dir() and not (tmp_path / "result.pt").exists()
    assert execute(tmp_path, release, None, True) == 0
    assert_ended_alike(whole[release], tmp_path)


def complete(out):
    """The newest checkpoint that Trainer had finished: its state is the last file. None if there is none."""
    for path in sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True):
        with suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text())
            return path
    return None


def kill_later(out, release, seconds):
    """Train and SIGKILL some seconds after the first checkpoint; whether that was before the end."""
    process, limit = start(out, release), time.monotonic() + TIMEOUT
    while complete(out) is None:
        assert process.is_alive() and time.monotonic() < limit, "no checkpoint came"
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.join(TIMEOUT)
    return process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("attempt", range(4))
def test_killed_at_any_moment_and_resumed_it_ends_as_if_it_had_not_been(whole, tmp_path, attempt, release):
    """Anywhere between the first checkpoint and the end: in forward, backward, an update, or a save."""
    written = [
        (whole[release] / name).stat().st_mtime for name in ("checkpoint-4/trainer_state.json", "result.pt")
    ]
    seconds, out = (
        random.uniform(0, 2) * (written[1] - written[0]),
        tmp_path / "0",
    )  # that was half of the way
    while not kill_later(out, release, seconds):
        seconds, out = 0.8 * seconds, tmp_path / str(int(out.name) + 1)
    checkpoint = complete(out)
    print(f"killed {seconds:.3f} s after checkpoint-2, goes on from {checkpoint.name}")
    assert not (out / "result.pt").exists()
    assert execute(out, release, None, str(checkpoint)) == 0
    assert_ended_alike(whole[release], out)
