"""What the plan knows of gradients on the disk, held against the optimizer's own."""

from dataclasses import replace

import pytest
import torch
from tiny_configs import config_of

from headrace.machine.machine import Machine
from headrace.memory.blocks import ALIGN
from headrace.memory.disk import DiskPath
from headrace.optim import engine
from headrace.optim.offloaded import OffloadedAdamW
from headrace.planner import memory, waiting
from headrace.planner.fit import judge
from headrace.planner.memory import predict
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload

PLAIN = Machine("plain", 2, {"ram": 2**40, "disk": 2**40})
CARD = Machine("card", 2, {"device": 2**40, "host": 2**40, "disk": 2**40})
SPEEDS = (1.0, 2.5)
WORK = Workload(24, 2, 3, bucket=2**16, workers=2, states="disk", gradients="disk", paths=SPEEDS)
SHAPE = ModelShape.from_config(config_of("llama tied", vocab_size=3001))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def optimizer_of(home, work):
    named = [
        (p.name, torch.nn.Parameter(torch.zeros(p.shape, dtype=DTYPES[work.dtype]))) for p in SHAPE.parameters
    ]
    groups = [[(n, p) for n, p in named if (p.ndim >= 2) == decays] for decays in (True, False)]
    return OffloadedAdamW(
        [{"params": group} for group in groups],
        release_gradients=True,
        micro_batches=work.micro_batches,
        bucket=work.bucket,
        workers=work.workers,
        disk=[DiskPath(home / str(number), speed=speed) for number, speed in enumerate(work.paths)],
        gradients=work.gradients,
        window=work.window,
    )


def test_constants_are_those_of_the_code_that_they_describe():
    assert waiting.IN_FLIGHT == engine.IN_FLIGHT
    assert waiting.DISK_BLOCK == ALIGN


@pytest.mark.parametrize("bucket", [2**16, 3 * 2**16, 2**24])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pool_disk_and_paths_are_exact(tmp_path, dtype, micro_batches, bucket):
    work = replace(WORK, dtype=dtype, micro_batches=micro_batches, bucket=bucket)
    optimizer = optimizer_of(tmp_path, work)
    measured = optimizer.ledger.peaks
    pool = {purpose: nbytes for purpose, nbytes in memory.pool_bytes(SHAPE, work, PLAIN).items() if nbytes}
    assert pool == measured["ram"]
    assert predict(SHAPE, work, PLAIN).peaks["disk"] == measured["disk"]
    for _ in range(micro_batches):
        sum(p.sum() for group in optimizer.param_groups for p in group["params"]).backward()
    optimizer.step()
    moved = waiting.waiting_moves(SHAPE, work)
    for action, nbytes in moved.items():
        lane = [
            account.nbytes
            for done, account in optimizer.ledger.actions.items()
            if done.lane == action.lane and done.unit.kind == "g"
        ]
        assert sum(lane) == nbytes * micro_batches
    element = 4 if micro_batches > 1 else work.element
    assert sum(moved.values()) == 2 * element * SHAPE.aligned_numel
    optimizer.close()


@pytest.mark.parametrize("machine", [PLAIN, CARD])
def test_gradients_leave_host_memory(machine):
    in_memory, on_disk = (predict(SHAPE, replace(WORK, gradients=g), machine) for g in ("host", "disk"))
    tier = machine.host_tier
    wait = waiting.waiting_bytes(SHAPE, WORK)
    assert wait == 4 * SHAPE.aligned_numel
    assert in_memory.peaks["disk"].keys() == {"states"}
    assert on_disk.peaks["disk"] == in_memory.peaks["disk"] | {"gradients": wait}
    buffers = on_disk.peaks[tier]["buffers"] - in_memory.peaks[tier]["buffers"]
    assert buffers == waiting.passing_bytes(SHAPE, WORK) == 3 * 2**16 * 4
    for lane in ("read:p0", "read:p1", "write:p0", "write:p1"):
        assert on_disk.lane_bytes(lane) > in_memory.lane_bytes(lane)


def test_the_disk_is_proposed_where_it_helps():
    shape = ModelShape.from_config(config_of("llama tied", hidden_size=256, num_hidden_layers=8))
    host, disk = (predict(shape, replace(WORK, gradients=g), PLAIN).total("ram") for g in ("host", "disk"))
    assert disk < host
    work = replace(WORK, gradients="host")
    settings = [fix.settings for fix in judge(shape, work, PLAIN, {"ram": (host + disk) // 2}).fixes]
    assert ("memory.gradients=disk",) in settings
    in_memory = replace(work, states="host", paths=())
    fixes = judge(shape, in_memory, PLAIN, {"ram": predict(shape, in_memory, PLAIN).total("ram") - 1}).fixes
    (fix,) = (fix for fix in fixes if fix.settings[0] == "memory.gradients=disk")
    assert fix.settings[1].startswith("memory.disk=")
    assert fix.ledger.peaks["disk"].keys() == {"gradients"}
