"""What a rank does in tests of shared optimizers: trains on gradients that all ranks draw alike."""

import faulthandler
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.memory.disk import DiskPath
from headrace.optim.offloaded import OffloadedAdamW

TIMEOUT = 60


def shapes(seed):
    """Odd lengths, a parameter cut over buckets, two dtypes, two param groups."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randint(1, 300, (5,), generator=generator).tolist()
    return [(2**17 + 48,), (odd[0], odd[1]), (odd[2],), (2**16,), (odd[3], odd[4])]


def groups_of(seed, dtype):
    generator = torch.Generator().manual_seed(seed + 1)
    found = [
        (f"p{i}", torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)))
        for i, s in enumerate(shapes(seed))
    ]
    return [
        {"params": found[:3], "weight_decay": 0.1},
        {"params": found[3:], "weight_decay": 0.0},
    ]


def paths_in(home, paths):
    return [DiskPath(Path(home) / f"d{i}", speed=1.0 + i) for i in range(paths)]


def train(optimizer, seed, steps, micro_batches, first=0):
    """Steps on drawn gradients: one of them lacks a parameter, one is not finite."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for microbatch in range(micro_batches):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * step + microbatch)
            terms = []
            for index, parameter in enumerate(parameters):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if step == 1 and index == 2:
                    continue
                if step == 2 and index == 0:
                    gradient.view(-1)[-1] = torch.inf
                terms.append((parameter * gradient).sum())
            sum(terms).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(
    seed, home, group=None, *, paths, window, micro_batches, released, gradients="host", dtype=torch.bfloat16
):
    return OffloadedAdamW(
        groups_of(seed, dtype),
        lr=1e-2,
        max_grad_norm=1.0,
        release_gradients=released,
        micro_batches=micro_batches,
        disk=paths_in(home, paths) if paths else (),
        gradients=gradients,
        window=window,
        bucket=2**16,
        workers=1,
        group=group,
    )


def outcome(optimizer):
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    states = {k: {n: t.clone() for n, t in v.items()} for k, v in optimizer.state_dict()["state"].items()}
    return weights, states, optimizer.norm.value


def run(rank, ranks, rendezvous, home, seed, steps, options, result):
    """One rank's process."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    optimizer = build(seed, home, dist.group.WORLD, **options)
    train(optimizer, seed, steps, options["micro_batches"])
    found = outcome(optimizer)
    held = optimizer.ledger.peaks["ram"].get("states", 0)
    optimizer.close()
    torch.save((found, held), f"{result}.{rank}")
    dist.destroy_process_group()


def run_again(rank, ranks, rendezvous, home, seed, options, result):
    """One rank's process: trains, saves, goes on from what was saved in a new optimizer, trains on."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    optimizer = build(seed, home, dist.group.WORLD, **options)
    train(optimizer, seed, 2, options["micro_batches"])
    kept = Path(home) / "kept"
    kept.mkdir(exist_ok=True)
    files, counts = optimizer.save_states(kept), optimizer.counts
    dist.barrier()
    optimizer.close()
    again = build(seed, home, dist.group.WORLD, **options)
    again.restore(counts, files=files)
    train(again, seed, 3, options["micro_batches"], first=2)
    torch.save((outcome(again), len(files)), f"{result}.{rank}")
    again.close()
    dist.destroy_process_group()


def lone(seed, home, steps, options):
    """The same without other ranks, states in memory."""
    optimizer = build(seed, home, **{**options, "paths": 0, "gradients": "host"})
    train(optimizer, seed, steps, options["micro_batches"])
    found = outcome(optimizer)
    optimizer.close()
    return found


def hold_turns(path, marks, rounds):
    """Take turns on a path many times, noting begin and end of each."""
    import os
    import time

    from headrace.memory.lock import Turn

    turn = Turn(Path(path))
    for _ in range(rounds):
        with turn, open(marks, "a", encoding="ascii") as file:
            for word in ("begin", "end"):
                file.write(f"{word} {os.getpid()}\n")
                file.flush()
                time.sleep(0.001)
    turn.close()
