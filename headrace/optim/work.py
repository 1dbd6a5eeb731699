"""What each kind of action does on its lane. Every function returns the bytes that it moved over its link."""

from typing import TYPE_CHECKING

import torch

from headrace.optim import kernel
from headrace.optim.collect import Parcel
from headrace.optim.gradients import DiskGradients
from headrace.optim.policies.base import Executor, Place
from headrace.optim.states import DiskStates
from headrace.schedule.action import Action, Kind
from headrace.schedule.layout import Bucket

if TYPE_CHECKING:
    from headrace.optim.engine import Engine


def down(engine: "Engine", action: Action, place: Place) -> int:
    """Copy a parcel's gradients into the host bucket, or add them to what is there."""
    assert action.microbatch is not None
    bucket = _bucket(engine, action)
    parcel = engine.collector.parcels.pop((action.microbatch, bucket.index))
    target = engine.store.gradients.of(bucket, place.gradient)
    landing = engine.store.landing.get(bucket.dtype)
    nbytes = 0
    for s in bucket.segments:
        if (arrived := parcel.arrived.get(s.parameter)) is None:
            continue
        source = arrived.part(s.start, s.stop)
        nbytes += source.nbytes
        if landing is not None:
            source = landing[s.offset : s.end].copy_(source)
        if s.parameter in parcel.first:
            target[s.offset : s.end].copy_(source, non_blocking=True)
        else:
            target[s.offset : s.end].add_(source)
    _free(engine, parcel)
    return nbytes


def _free(engine: "Engine", parcel: Parcel) -> None:
    """Let go of gradients that every bucket has copied."""
    if engine.lanes.device.type == "cuda":
        # The allocator may hand freed memory to the compute stream at once: the copies must be through.
        torch.cuda.current_stream(engine.lanes.device).synchronize()
    engine.device.note("gradients", -sum(arrived.copied() for arrived in parcel.arrived.values()))


def norm(engine: "Engine", action: Action, place: Place) -> int:
    """Sum the squares of a bucket's gradient: of what has one in this step, or came with a micro-batch."""
    bucket, workers = _bucket(engine, action), engine.lanes.workers
    gradient = engine.store.gradients.of(bucket, place.gradient)
    active = engine.collector.seen(bucket.index, action.microbatch)

    def share(worker: int) -> None:
        blocks = engine.sums.blocks(bucket.index, active, worker, workers.count)
        engine.sums.add(blocks, gradient, engine.store.blocks[worker])

    workers.run(share)
    return 0


def clip(engine: "Engine", action: Action, place: Place) -> int:
    """The global norm and the clip coefficient."""
    engine.norm = engine.sums.finish(engine.limit, engine.ranks)
    return 0


def update(engine: "Engine", action: Action, place: Place) -> int:
    """AdamW over a bucket; the new weights are staged."""
    bucket, workers = _bucket(engine, action), engine.lanes.workers
    tensors = engine.store.bucket(bucket, place)
    seen = engine.collector.seen(bucket.index)
    hyper, coefficient = engine.hypers[bucket.group], engine.norm.coefficient

    def share(worker: int) -> None:
        counts = {p: torch.tensor(float(engine.counts[p] + 1)) for p in seen}
        span = kernel.share(bucket.size, worker, workers.count)
        kernel.adamw(bucket, tensors, span, counts, hyper, coefficient, engine.store.chunks[worker])

    workers.run(share)
    for s in bucket.segments if bucket.unit is not None else ():
        if s.parameter not in seen:  # it goes to the disk with the rest of its bucket
            tensors.weight[s.offset : s.end].copy_(tensors.master[s.offset : s.end])
    return 0


def up(engine: "Engine", action: Action, place: Place) -> int:
    """Copy a bucket's staged weights into the working weights."""
    bucket = _bucket(engine, action)
    staged, seen = engine.store.staged(bucket, place), engine.collector.seen(bucket.index)
    nbytes = 0
    for s in bucket.segments:
        if s.parameter in seen:
            source = staged[s.offset : s.end]
            engine.weights.flat[s.parameter][s.start : s.stop].copy_(source, non_blocking=True)
            nbytes += source.nbytes
    return nbytes


def _bucket(engine: "Engine", action: Action) -> Bucket:
    assert action.unit is not None and action.unit.kind in ("b", "w", "g"), action
    return engine.store.layout.buckets[action.unit.index]


def read(engine: "Engine", action: Action, place: Place) -> int:
    """Read a bucket's states, or its gradient, from a disk path."""
    bucket, path = _bucket(engine, action), _path(action)
    if _kind(action) == "g":
        return _gradients(engine).read(bucket, path, place.gradient)
    states = _states(engine)
    return states.read(bucket, path, states.at(place.states))


def write(engine: "Engine", action: Action, place: Place) -> int:
    """Write a bucket's states, its gradient, or its new weights, to a disk path."""
    bucket, path = _bucket(engine, action), _path(action)
    if _kind(action) == "w":
        assert engine.weights.off is not None
        return engine.weights.off.put(bucket.index, path, engine.store.staged(bucket, place))
    if _kind(action) == "g":
        return _gradients(engine).write(bucket, path, place.gradient)
    states = _states(engine)
    return states.write(bucket, path, states.at(place.states))


def _kind(action: Action) -> str:
    assert action.unit is not None, action
    return action.unit.kind


def _path(action: Action) -> int:
    assert action.path is not None, action
    return action.path


def _states(engine: "Engine") -> DiskStates:
    assert isinstance(engine.store.states, DiskStates)
    return engine.store.states


def _gradients(engine: "Engine") -> DiskGradients:
    assert isinstance(engine.store.gradients, DiskGradients)
    return engine.store.gradients


EXECUTORS: dict[Kind, Executor] = {
    Kind.DOWN: down,
    Kind.NORM: norm,
    Kind.CLIP: clip,
    Kind.UPDATE: update,
    Kind.UP: up,
    Kind.READ: read,
    Kind.WRITE: write,
}
"""The engine's own executors; a policy may replace some or add others."""
