"""OffloadedAdamW in two processes: kept gradients are averaged as for torch, released ones are refused."""

import copy
import multiprocessing
import os
import socket

import pytest
import torch
from torch import nn

TIMEOUT = 300
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rank(number, port, out):
    """One of two ranks, as torchrun starts them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(number)}
    os.environ.update({**place, "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.save(train(number), out / f"weights-{number}.pt")
    (out / f"refusal-{number}.txt").write_text(refusal(out))
    torch.distributed.destroy_process_group()


def train(number):
    """The weights after torch's AdamW and after ours, on gradients that DistributedDataParallel averages."""
    from headrace import OffloadedAdamW

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16))
    results = []
    for make in (torch.optim.AdamW, OffloadedAdamW):
        replica = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        own = {"fused": True} if make is torch.optim.AdamW else {"workers": 1}
        optimizer = make(replica.parameters(), **SETTINGS, **own)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + number)
            replica(torch.randn(8, 64, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([parameter.detach().flatten() for parameter in replica.parameters()]))
    return results


def refusal(out):
    """What Trainer's arguments in this process are answered with."""
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from headrace import OffloadedAdamW, TrainerCallback
    from headrace.errors import UserError

    arguments = TrainingArguments(str(out), max_grad_norm=0, use_cpu=True, ddp_backend="gloo", report_to=[])
    optimizer = OffloadedAdamW([nn.Parameter(torch.zeros(4))], release_gradients=True)
    try:
        TrainerCallback(optimizer).on_train_begin(
            arguments, TrainerState(), TrainerControl(), optimizer=optimizer
        )
    except UserError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.slow
def test_two_processes_train_like_torchs_adamw_or_refuse(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(number, port, tmp_path)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
    assert [process.exitcode for process in ranks] == [0, 0]
    expected = torch.load(tmp_path / "weights-0.pt")[0]
    for number in range(2):
        theirs, ours = torch.load(tmp_path / f"weights-{number}.pt")
        assert torch.equal(theirs, expected) and torch.equal(ours, expected)
        text = (tmp_path / f"refusal-{number}.txt").read_text()
        assert "each of the 2 processes would train on its own gradients" in text
