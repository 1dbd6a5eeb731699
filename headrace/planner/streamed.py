"""Weights and layer inputs off the device: what they take of which tier, and the bytes of their journeys."""

from collections import Counter
from collections.abc import Iterable, Iterator

from headrace.machine.machine import Machine
from headrace.machine.paths import split
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload
from headrace.schedule.action import Action, Kind, Unit
from headrace.schedule.fetches import AHEAD, Passage, Shelf
from headrace.schedule.layout import STREAMED, Layout, Parameter, cut, extended, padded

ROW_SLOTS = 2
"""Buckets of an embedding that are on the device where it comes by rows (models.rows)."""

SLOTS = 2
"""Layer inputs in memory on their way to and from the disk (models.boundaries)."""


def streamed_layout(shape: ModelShape, work: Workload) -> Layout:
    """The buckets of weights that are streamed: matrices of layers and embeddings."""
    units = [(p, _unit(shape, p.name)) for p in shape.parameters if len(p.shape) >= 2]
    parameters = [Parameter(p.name, p.numel, 0, work.dtype, unit) for p, unit in units if unit is not None]
    return cut(parameters, work.bucket)


def optimizer_layout(shape: ModelShape, work: Workload) -> Layout:
    """The optimizer's buckets; those of streamed weights are the weights' own."""
    if work.weights == "device" or shape.adapters is not None:
        return shape.layout(work.bucket)
    return extended(streamed_layout(shape, work), shape.grouped, work.bucket)


def resident_numel(shape: ModelShape, work: Workload) -> int:
    """Elements of the model's own parameters that stay on the device."""
    if work.weights == "device":
        return shape.numel
    return shape.numel - sum(parameter.numel for parameter in streamed_layout(shape, work).parameters)


def slot_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the device in which streamed weights are while they are used; exact."""
    sizes = _sizes(streamed_layout(shape, work))
    shelves = _shelves(sizes, work)
    whole = sum(shelf.slots * max(sizes[unit] for unit in shelf.units) for shelf in shelves)
    return work.element * (whole + sum(_row_slots(shape, work).values()))


def home_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the streamed weights where they live; exact."""
    return work.element * streamed_layout(shape, work).size


def buffer_bytes(shape: ModelShape, work: Workload, machine: Machine) -> dict[str, int]:
    """Bytes by tier of what weights and layer inputs pass through; exact."""
    found = Counter({machine.host_tier: 0, machine.device_tier: 0})
    if work.weights == "disk":
        largest = max(bucket.size for bucket in streamed_layout(shape, work).buckets)
        found[machine.host_tier] += work.element * largest
        if not machine.unified:
            found[machine.host_tier] += slot_bytes(shape, work)
    if work.activations in ("host", "disk"):
        passing = min(SLOTS, shape.layers) * input_bytes(shape, work)
        if work.activations == "disk":
            found[machine.host_tier] += passing
        if not machine.unified:
            found[machine.device_tier] += passing
    return dict(found)


def input_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the memory of one layer's input; exact."""
    return work.element * padded(work.tokens * shape.hidden, STREAMED)


def kept_bytes(shape: ModelShape, work: Workload) -> dict[str, int]:
    """Tier -> bytes of layer inputs that wait there; exact."""
    if work.activations == "host":
        return {"host": shape.layers * input_bytes(shape, work)}
    if work.activations == "disk":
        return {"disk": _left(shape) * work.tokens * shape.hidden * work.element}
    return {}


def journeys(shape: ModelShape, work: Workload, machine: Machine) -> Iterator[tuple[Action, int]]:
    """Bytes that streamed weights and layer inputs move in one step, by kind of action and path; exact.

    Layer inputs are counted for rows of the full context.
    """
    if work.weights != "device":
        yield from _weights(shape, work, machine)
    if work.activations in ("host", "disk"):
        yield from _inputs(shape, work, machine)


def _weights(shape: ModelShape, work: Workload, machine: Machine) -> Iterator[tuple[Action, int]]:
    layout = streamed_layout(shape, work)
    sizes = _sizes(layout)
    layers = [unit for unit in sizes if unit.kind == "l"]
    ends = sorted((unit for unit in sizes if unit.kind == "e"), key=lambda unit: unit.index)
    whole = ends if work.embeddings == "whole" else [None]
    passage = Passage(whole[0], sorted(layers, key=lambda unit: unit.index), whole[-1])
    fetched = passage.fetched(_shelves(sizes, work), work.micro_batches)
    if work.embeddings == "rows":  # once for the lookup, twice for the loss
        for unit in ends:
            uses = (unit == ends[0]) + 2 * (unit == ends[-1])
            fetched[unit] = uses * work.micro_batches
    if work.weights == "host" or not machine.unified:
        yield Action(Kind.UP), work.element * sum(sizes[unit] * times for unit, times in fetched.items())
    if work.weights == "disk":
        for bucket in layout.buckets:
            assert bucket.unit is not None
            yield from _on_paths(Kind.READ, bucket.size, bucket.index, work, fetched[bucket.unit])
            if shape.adapters is None:
                yield from _on_paths(Kind.WRITE, bucket.size, bucket.index, work, 1)


def _inputs(shape: ModelShape, work: Workload, machine: Machine) -> Iterator[tuple[Action, int]]:
    numel, times = work.tokens * shape.hidden, work.micro_batches
    yield Action(Kind.DOWN), shape.layers * numel * work.element * times
    if not machine.unified:
        yield Action(Kind.UP), shape.layers * numel * work.element * times
    for index in range(_left(shape) if work.activations == "disk" else 0):
        for kind in (Kind.READ, Kind.WRITE):
            yield from _on_paths(kind, numel, index, work, times)


def _on_paths(
    kind: Kind, numel: int, number: int, work: Workload, times: int
) -> Iterator[tuple[Action, int]]:
    for path, (low, high) in enumerate(split(numel, work.paths, number)):
        yield Action(kind, path=path), (high - low) * work.element * times


def _left(shape: ModelShape) -> int:
    """Layers whose input goes to the disk: those of the last ones wait in memory."""
    return max(0, shape.layers - SLOTS)


def _sizes(layout: Layout) -> dict[Unit, int]:
    sizes: Counter[Unit] = Counter()
    for bucket in layout.buckets:
        assert bucket.unit is not None
        sizes[bucket.unit] += bucket.size
    return dict(sizes)


def _shelves(units: Iterable[Unit], work: Workload) -> list[Shelf]:
    layers, ends = ([unit for unit in units if unit.kind == kind] for kind in "le")
    return [Shelf(layers, 1 + AHEAD), *([Shelf(ends, 1)] if work.embeddings == "whole" else [])]


def _row_slots(shape: ModelShape, work: Workload) -> dict[Unit, int]:
    """Elements of the slots of embeddings that come by rows."""
    largest: dict[Unit, int] = {}
    for bucket in streamed_layout(shape, work).buckets if work.embeddings == "rows" else ():
        if bucket.unit is not None and bucket.unit.kind == "e":
            largest[bucket.unit] = max(largest.get(bucket.unit, 0), bucket.size)
    return {unit: ROW_SLOTS * size for unit, size in largest.items()}


def _unit(shape: ModelShape, name: str) -> Unit | None:
    table = shape.family.table
    if name == table.before[0].name:
        return Unit("e", 0)
    if name == table.head.name:
        return Unit("e", 1)
    if not name.startswith(table.prefix + "."):
        return None
    return Unit("l", int(name.removeprefix(table.prefix + ".").split(".", 1)[0]))
