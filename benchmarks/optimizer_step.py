"""How near the memory's bandwidth is the optimizer's kernel? Ours and its peers, in one process, interleaved.

    pip install setuptools wheel ninja && pip install --no-build-isolation deepspeed==0.19.8   # needs g++
    python -m benchmarks.optimizer_step --json

All do the same: bf16 gradients in, AdamW on fp32 master weights and moments, bf16 weights out. That is 28
bytes an element at least. The limit is a plain stream that reads and writes the same 28 bytes, on the same
threads.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial

from headrace.memory.process import prepare_process

prepare_process()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.report import Check, finish  # noqa: E402
from benchmarks.timing import interleave, ratio  # noqa: E402
from headrace.lanes.lanes import Lanes  # noqa: E402
from headrace.lanes.workers import Share  # noqa: E402
from headrace.ledger import Ledger  # noqa: E402
from headrace.memory.budget import Budget  # noqa: E402
from headrace.memory.pool import HostPool  # noqa: E402
from headrace.optim.gradients import RamGradients, kept_dtypes  # noqa: E402
from headrace.optim.kernel import Hyper, adamw, share  # noqa: E402
from headrace.optim.offloaded import BUCKET  # noqa: E402
from headrace.optim.policies.base import Place  # noqa: E402
from headrace.optim.policies.sync import Sync  # noqa: E402
from headrace.optim.states import RamStates  # noqa: E402
from headrace.optim.store import HostStore  # noqa: E402
from headrace.schedule.action import Action, Kind, bucket  # noqa: E402
from headrace.schedule.layout import Bucket, Parameter, cut  # noqa: E402

CLIP = 0.37
"""A clip coefficient; multiplying by it is part of the work where a row says so."""
STREAM_CHUNK = 2**22


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--elements", type=int, default=6 * BUCKET)
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    rows = {
        "stream": stream(given.elements, given.threads),
        "headrace": headrace(given.elements, given.threads, 1.0),
        "headrace, clipping": headrace(given.elements, given.threads, CLIP),
        **plain("torch fused, casts", given.elements, partial(torch.optim.AdamW, fused=True)),
        **plain("torch foreach, casts", given.elements, partial(torch.optim.AdamW, foreach=True)),
        **deepspeed(given.elements, given.threads),
    }
    seconds = interleave(rows, given.rounds)
    figures = {name: ratio(seconds["stream"], found) for name, found in seconds.items()}
    print(f"share of the stream's bandwidth, {given.elements:,} elements, {given.threads} threads")
    for name, value in figures.items():
        gbs = given.elements * 28 / sorted(seconds[name])[len(seconds[name]) // 2] / 1e9
        print(f"  {name:32} {value:5.2f}  {gbs:6.1f} GB/s")
    checks = [Check("headrace: share of the stream", figures["headrace"], 0.80, figures["headrace"] >= 0.80)]
    peer = "DeepSpeed CPUAdam, casts"
    over = ratio(seconds[peer], seconds["headrace"]) if peer in seconds else 0.0
    checks.append(Check("headrace: times as fast as DeepSpeed's CPUAdam", over, 1.2, over >= 1.2))
    finish(figures, checks, given.json)


def stream(numel: int, threads: int) -> Callable[[], None]:
    """Reads and writes three fp32 tables in place and copies one bf16 table: 28 bytes an element."""
    tables = [torch.zeros(numel) for _ in range(3)]
    source, target = torch.zeros(2, numel, dtype=torch.bfloat16)
    lanes = Lanes(torch.device("cpu"), Ledger(), threads)

    def part(worker: int) -> None:
        low, high = share(numel, worker, threads)
        for start in range(low, high, STREAM_CHUNK):
            stop = min(high, start + STREAM_CHUNK)
            for table in tables:
                table[start:stop].add_(1.0)
            target[start:stop].copy_(source[start:stop])

    return partial(on_the_lane, lanes, part)


def on_the_lane(lanes: Lanes, *parts: Share) -> None:
    """Run shares of the work on every worker of the cpu lane, one after the other, as the optimizer does."""

    def execute(part: Share) -> int:
        lanes.workers.run(part)
        return 0

    actions = (Action(Kind.UPDATE, unit=bucket(index)) for index in range(len(parts)))
    events = [lanes.submit(a, partial(execute, part)) for a, part in zip(actions, parts, strict=True)]
    for event in events:
        lanes.wait(event)


def headrace(numel: int, threads: int, coefficient: float) -> Callable[[], None]:
    """The kernel over the buckets of a bf16 parameter, in the host buffers and on the workers of a run."""
    layout = cut([Parameter("weight", numel, 0, "bf16")], BUCKET)
    pool = HostPool(Budget("ram", None, Ledger(), "memory.host"))
    states = RamStates(layout, Sync().tables, pool)
    gradients = RamGradients(layout, kept_dtypes(summed=False), pool)
    store = HostStore(
        layout, states, gradients, pool, capacity=BUCKET, summed=False, landing=False, workers=threads
    )
    lanes = Lanes(torch.device("cpu"), Ledger(), threads)
    steps, hyper = itertools.count(1), Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2)
    for each in layout.buckets:
        gradients.of(each, None).normal_()

    def execute() -> None:
        counts = {0: torch.tensor(float(next(steps)))}

        def part(each: Bucket, worker: int) -> None:
            span = share(each.size, worker, threads)
            adamw(each, store.bucket(each, Place()), span, counts, hyper, coefficient, store.chunks[worker])

        on_the_lane(lanes, *(partial(part, each) for each in layout.buckets))

    return execute


def plain(name: str, numel: int, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Callable[[], None]]:
    """A torch optimizer on fp32 master weights, a cast before and after it; without and with clipping."""
    return {name: cast_around(numel, make, 1.0), f"{name}, clipping": cast_around(numel, make, CLIP)}


def cast_around(
    numel: int, make: Callable[..., torch.optim.Optimizer], coefficient: float
) -> Callable[[], None]:
    master = nn.Parameter(torch.randn(numel))
    optimizer = make([master])
    gradient: Tensor = torch.randn(numel).bfloat16()
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    master.grad = torch.zeros(numel)

    def execute() -> None:
        assert master.grad is not None
        master.grad.copy_(gradient)
        if coefficient != 1.0:
            master.grad.mul_(coefficient)
        optimizer.step()
        weight.copy_(master.detach())

    return execute


def deepspeed(numel: int, threads: int) -> dict[str, Callable[[], None]]:
    """DeepSpeed's CPUAdam as its ZeRO-Offload uses it, or nothing where it is not installed."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        print("DeepSpeed is not installed: see the top of this file")
        return {}
    return plain("DeepSpeed CPUAdam, casts", numel, partial(DeepSpeedCPUAdam, adamw_mode=True))


if __name__ == "__main__":
    main()
