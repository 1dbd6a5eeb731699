"""States on the disk: the memory of their window and the bytes that each path reads and writes."""

from collections import Counter

from headrace.machine.paths import split
from headrace.planner.shape import ModelShape
from headrace.planner.streamed import optimizer_layout
from headrace.planner.workload import STATE, Workload
from headrace.schedule.action import Action, Kind
from headrace.schedule.window import Read, Window, Write

DISK_BLOCK = 1024
"""Elements of fp32 in a block of the disk: places of the window are whole ones (memory.blocks.ALIGN)."""


def window_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of host memory in which states lie while they are updated; exact."""
    sizes = _sizes(shape, work)
    place = -(-max(sizes, default=0) // DISK_BLOCK) * DISK_BLOCK
    return STATE * place * min(work.window, len(sizes))


def disk_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the living states on all paths; exact."""
    return STATE * optimizer_layout(shape, work).size


def path_bytes(shape: ModelShape, work: Workload, steps: int = 3) -> dict[Action, int]:
    """Bytes of states that each path reads and writes a step, on average over the first ``steps``; exact.

    The first step finds nothing in memory, and later ones walk in turn up and down.
    """
    sizes = _sizes(shape, work)
    moved = _moves(len(sizes), work.window, steps)
    found: dict[Action, int] = {}
    for path in range(len(work.paths)):
        for kind in (Kind.READ, Kind.WRITE):
            nbytes = 0
            for index, size in enumerate(sizes):
                low, high = split(size, work.paths, index)[path]
                nbytes += STATE * (high - low) * moved[kind, index]
            found[Action(kind, path=path)] = round(nbytes / steps)
    return found


def _sizes(shape: ModelShape, work: Workload) -> list[int]:
    return [bucket.size for bucket in optimizer_layout(shape, work).buckets]


def _moves(buckets: int, places: int, steps: int) -> Counter[tuple[Kind, int]]:
    """How often each bucket is read and written in the first ``steps`` steps."""
    window = Window(places, buckets)
    first, falling, rising = (_of_step(window, buckets, step) for step in range(3))
    found: Counter[tuple[Kind, int]] = Counter()
    for counts, times in ((first, 1), (falling, steps // 2), (rising, (steps - 1) // 2)):
        for key, count in counts.items():
            found[key] += count * times
    return found


def _of_step(window: Window, buckets: int, step: int) -> Counter[tuple[Kind, int]]:
    found: Counter[tuple[Kind, int]] = Counter()
    for move in window.step(window.ordered(range(buckets)), step):
        if isinstance(move, Read):
            found[Kind.READ, move.bucket] += 1
        elif isinstance(move, Write):
            found[Kind.WRITE, move.bucket] += 1
    return found


def fitting_window(shape: ModelShape, work: Workload, free: int) -> int:
    """The most buckets whose window takes no more than ``free`` bytes, and at least one."""
    sizes = _sizes(shape, work)
    place = STATE * (-(-max(sizes, default=1) // DISK_BLOCK) * DISK_BLOCK)
    return max(1, min(len(sizes), free // place))
