"""OffloadedAdamW in TRL's SFTTrainer: torch's numbers, and exact continuation after a kill."""

import multiprocessing
import signal

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


def execute(out, *arguments):
    """`sft.run` in a process of its own; its exit code."""
    out.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sft"])
    process = context.Process(target=sft.run, args=(out, *arguments))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the training hangs"
    return process.exitcode


@pytest.mark.slow
def test_killed_and_resumed_it_ends_as_if_it_had_not_been(tmp_path):
    """Killed in the fifth step's backward, when some gradients have left and the last checkpoint is at 4."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert execute(whole) == 0
    assert execute(again, 4) == -signal.SIGKILL
    assert (again / "checkpoint-4").is_dir() and not (again / "result.pt").exists()
    assert execute(again, None, True) == 0
    expected, found = torch.load(whole / "result.pt"), torch.load(again / "result.pt")
    assert expected.keys() == found.keys() and any(name.startswith("master.") for name in found)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
