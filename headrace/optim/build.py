"""Builds what an optimizer owns: buckets, host buffers, lanes and the engine that runs them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor

from headrace.config import parse_size
from headrace.lanes.lanes import Lanes
from headrace.ledger import Ledger
from headrace.memory.budget import Budget
from headrace.memory.disk import DiskPath, DiskStore
from headrace.memory.pool import HostPool
from headrace.optim.checks import check_places, device_of
from headrace.optim.engine import Engine
from headrace.optim.policies.base import Policy
from headrace.optim.states import DiskStates, RamStates, States
from headrace.optim.store import NAMES, HostStore
from headrace.optim.weights import WorkingWeights
from headrace.schedule.layout import Layout, Parameter, cut


def build_engine(
    named: Mapping[str, Tensor],
    groups: Mapping[str, int],
    policy: Policy,
    ledger: Ledger,
    resources: ExitStack,
    *,
    host: int | str | None,
    disk: Sequence[DiskPath],
    window: int,
    kept: int,
    bucket: int,
    workers: int,
    micro_batches: int,
    summed: bool,
) -> Engine:
    """An engine with its buffers and threads, whose ends are entered into ``resources``.

    Args:
        named: the trained parameters.
        groups: the param group of each name.
        policy: emits the actions.
        ledger: account to book in.
        host: budget of host memory; None for no limit.
        disk: paths on which the states live; none for host memory.
        window: buckets of them in host memory at once.
        kept: checkpoints that will hold them beside.
        bucket: elements of the largest bucket.
        workers: threads of the update.
        micro_batches: backward passes of a step.
        summed: whether their gradients are summed on the host.

    Raises:
        UserError: a budget too small.
    """
    parameters = [Parameter(name, p.numel(), groups[name], NAMES[p.dtype]) for name, p in named.items()]
    device = device_of(named)
    on_cpu = device.type == "cpu"
    limit = None if host is None else parse_size(host)
    on_host = Budget("ram" if on_cpu else "host", limit, ledger, "memory.host")
    on_device = on_host if on_cpu else Budget("device", None, ledger, "memory.device")
    layout = cut(parameters, capacity=bucket)
    pool = HostPool(on_host, pin=device.type == "cuda")
    store = HostStore(
        layout,
        _states(layout, policy.tables, pool, _disk(disk, ledger, resources), window, kept),
        pool,
        capacity=bucket,
        summed=summed,
        landing=not on_cpu,
        workers=workers,
    )
    resources.callback(store.close)
    lanes = Lanes(device, ledger, workers)
    resources.callback(lanes.close)
    return Engine(WorkingWeights(named), store, policy, lanes, on_device, micro_batches)


def _disk(paths: Sequence[DiskPath], ledger: Ledger, resources: ExitStack) -> DiskStore | None:
    if not paths:
        return None
    sizes = [path.size for path in paths if path.size is not None]
    limit = sum(sizes) if len(sizes) == len(paths) else None
    store = DiskStore(paths, Budget("disk", limit, ledger, "memory.disk"))
    resources.callback(store.close)
    return store


def _states(
    layout: Layout, tables: Sequence[str], pool: HostPool, disk: DiskStore | None, window: int, kept: int
) -> States:
    check_places(window, kept)
    if disk is None:
        return RamStates(layout, tables, pool)
    return DiskStates(layout, tables, pool, disk, places=window, kept=kept)
