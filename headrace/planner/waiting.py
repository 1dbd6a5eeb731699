"""Gradients that wait for the update, in host memory or on the disk: what they take of which, and move."""

from collections import Counter

from headrace.machine.paths import split
from headrace.planner.shape import ModelShape
from headrace.planner.streamed import optimizer_layout, resident_numel
from headrace.planner.workload import Workload
from headrace.schedule.action import Action, Kind
from headrace.schedule.window import BUFFERS

DISK_BLOCK = 4096
"""Bytes of a block of the disk: buffers are whole ones (memory.blocks.ALIGN)."""

IN_FLIGHT = 2
"""Buckets of gradients that may be on their way down before backward waits (optim.engine)."""


def waiting_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of all gradients where they wait; exact."""
    return _element(work) * optimizer_layout(shape, work).size


def passing_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the host buffers through which gradients pass on their way to and from the disk; exact."""
    if work.gradients == "host":
        return 0
    sizes = [_element(work) * bucket.size for bucket in optimizer_layout(shape, work).buckets]
    return min(BUFFERS, len(sizes)) * -(-max(sizes, default=0) // DISK_BLOCK) * DISK_BLOCK


def arriving_numel(shape: ModelShape, work: Workload) -> int:
    """Elements of gradients that backward fills buckets with before it waits for those on their way down."""
    times = 1 + IN_FLIGHT if work.gradients == "disk" else 1
    if work.weights == "device" or shape.adapters is not None:
        return times * work.bucket
    buckets = optimizer_layout(shape, work).buckets  # cut by layers, but for norms, which fill up to the end
    largest = max((b.size for b in buckets if b.unit and b.unit.kind == "l"), default=work.bucket)
    return times * largest + resident_numel(shape, work)


def waiting_moves(shape: ModelShape, work: Workload) -> dict[Action, int]:
    """Bytes of gradients that each path reads and writes for every micro-batch of a step; exact.

    Each micro-batch is written, as it came or as the sum so far, which is read for the next one, and in the
    end for the update. So as much is read as written.
    """
    moved: Counter[Action] = Counter()
    for bucket in optimizer_layout(shape, work).buckets if work.gradients == "disk" else ():
        for path, (low, high) in enumerate(split(bucket.size, work.paths, bucket.index)):
            for kind in (Kind.READ, Kind.WRITE):
                moved[Action(kind, path=path)] += _element(work) * (high - low)
    return dict(moved)


def _element(work: Workload) -> int:
    """Bytes of an element of a gradient that waits; of several micro-batches the fp32 sum does."""
    return 4 if work.micro_batches > 1 else work.element
