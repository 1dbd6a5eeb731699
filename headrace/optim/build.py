"""Builds what an optimizer owns: buckets, host buffers and the engine that runs them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor
from torch.distributed import ProcessGroup

from headrace.memory.tiers import Tiers
from headrace.memory.weights import NAMES, WeightStore
from headrace.optim.checks import check_places
from headrace.optim.engine import Engine
from headrace.optim.gradients import DiskGradients, Gradients, RamGradients, kept_dtypes
from headrace.optim.policies.base import Policy
from headrace.optim.ranks import Ranks
from headrace.optim.states import DiskStates, RamStates, States
from headrace.optim.store import HostStore
from headrace.optim.weights import WorkingWeights
from headrace.schedule.layout import Layout, Parameter, cut, extended


def build_engine(
    named: Mapping[str, Tensor],
    groups: Mapping[str, int],
    policy: Policy,
    tiers: Tiers,
    resources: ExitStack,
    *,
    off: WeightStore | None,
    on_disk: bool,
    gradients_on_disk: bool,
    window: int,
    kept: int,
    bucket: int,
    micro_batches: int,
    summed: bool,
    group: ProcessGroup | None = None,
) -> Engine:
    """An engine with its buffers, whose ends are entered into ``resources``.

    Args:
        named: the trained parameters.
        groups: the param group of each name.
        policy: emits the actions.
        tiers: budgets, pools and lanes; they outlive the engine.
        off: the home of those parameters that are off the device.
        on_disk: whether states live on the disk of the tiers.
        gradients_on_disk: whether gradients wait there for the update.
        window: buckets of states on the disk that are in host memory at once.
        kept: checkpoints that will hold them beside.
        bucket: elements of the largest bucket.
        micro_batches: backward passes of a step.
        summed: whether their gradients are summed on the host.
        group: ranks that share the buckets; None for one alone.

    Raises:
        UserError: a budget too small.
    """
    parameters = [Parameter(name, p.numel(), groups[name], NAMES[p.dtype]) for name, p in named.items()]
    layout = extended(off.layout, parameters, bucket) if off else cut(parameters, bucket)
    check_places(window, kept)
    ranks = None if group is None else Ranks(layout, group)
    layout = layout if ranks is None else ranks.own
    rank = None if ranks is None else ranks.rank
    states = _states(layout, policy.tables, tiers, on_disk, window, kept, rank)
    resources.callback(states.close)  # the store closes it too, if there will be one
    store = HostStore(
        layout,
        states,
        _gradients(layout, tiers, gradients_on_disk, summed),
        tiers.pool,
        capacity=bucket,
        summed=summed,
        landing=tiers.lanes.device.type != "cpu",
        workers=tiers.lanes.workers.count,
        off=off,
    )
    resources.callback(store.close)
    weights = WorkingWeights(named, off)
    return Engine(weights, store, policy, tiers.lanes, tiers.device_budget, micro_batches, ranks)


def _states(
    layout: Layout,
    tables: Sequence[str],
    tiers: Tiers,
    on_disk: bool,
    window: int,
    kept: int,
    rank: int | None,
) -> States:
    if not on_disk:
        return RamStates(layout, tables, tiers.pool)
    assert tiers.disk is not None
    return DiskStates(layout, tables, tiers.pool, tiers.disk, places=window, kept=kept, rank=rank)


def _gradients(layout: Layout, tiers: Tiers, on_disk: bool, summed: bool) -> Gradients:
    if not on_disk:
        return RamGradients(layout, kept_dtypes(summed), tiers.pool)
    assert tiers.disk is not None
    return DiskGradients(layout, kept_dtypes(summed), tiers.pool, tiers.disk)
