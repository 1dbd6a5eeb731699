"""Working weights that live off the device, bucket by bucket: in host memory, or on the disk.

Whoever trains them writes them here, and whoever computes with them fetches them from here; neither knows
where they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from headrace.memory.disk import DiskStore
from headrace.memory.parts import Form
from headrace.memory.pool import HostPool
from headrace.schedule.layout import Bucket, Layout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Training dtypes by their names in layouts and run files."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

TABLE = "weights"
"""The one table of a bucket's file."""


class WeightStore(ABC):
    """The home of weights that are on the device only while they are used.

    Args:
        layout: of the streamed parameters.

    Attributes:
        paths: disk paths over which each bucket is divided, 0 in host memory.
        withdraw: called before weights are written, when nothing is on its way to them; whoever keeps
            copies gives them up then.
    """

    paths = 0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.withdraw: Callable[[], None] = lambda: None

    @abstractmethod
    def home(self, bucket: int) -> Tensor | None:
        """A bucket's weights where they live, 1-D; None where that is no memory."""

    @abstractmethod
    def fetch(self, bucket: int, path: int, target: Tensor) -> int:
        """Copy what ``path`` holds of a bucket to its place in a 1-D tensor; returns the bytes."""

    @abstractmethod
    def put(self, bucket: int, path: int, source: Tensor) -> int:
        """Take what ``path`` holds of a bucket from a 1-D tensor; returns the bytes."""

    @abstractmethod
    def visited(self, bucket: int, *, write: bool) -> AbstractContextManager[Tensor]:
        """A bucket's weights in host memory, 1-D, for a while in which nothing is on its way.

        Args:
            bucket: its index in the layout.
            write: whether they are changed; all of them are, if nothing was written before.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class HostWeights(WeightStore):
    """Weights in host memory, pinned where there is an accelerator.

    Args:
        layout: of the streamed parameters.
        pool: hands out the memory.
    """

    def __init__(self, layout: Layout, pool: HostPool) -> None:
        super().__init__(layout)
        self._pool = pool
        self._homes: list[Tensor] = []
        try:
            for b in layout.buckets:
                what = f"weights of bucket {b.index} ({b.unit}, memory.weights)"
                self._homes.append(pool.take(b.size, DTYPES[b.dtype], "weights", what))
        except BaseException:
            self.close()
            raise

    def home(self, bucket: int) -> Tensor:
        """See :class:`WeightStore`."""
        return self._homes[bucket]

    def fetch(self, bucket: int, path: int, target: Tensor) -> int:
        """See :class:`WeightStore`."""
        target.copy_(self._homes[bucket], non_blocking=True)
        return target.nbytes

    def put(self, bucket: int, path: int, source: Tensor) -> int:
        """See :class:`WeightStore`."""
        self._homes[bucket].copy_(source)
        return source.nbytes

    @contextmanager
    def visited(self, bucket: int, *, write: bool) -> Iterator[Tensor]:
        """See :class:`WeightStore`."""
        if write:
            self.withdraw()
        yield self._homes[bucket]

    def close(self) -> None:
        """See :class:`WeightStore`."""
        while self._homes:
            self._pool.give_back(self._homes.pop())


class DiskWeights(WeightStore):
    """Weights on the disk.

    Args:
        layout: of the streamed parameters.
        pool: hands out a buffer of one bucket, for visits.
        disk: keeps them.
    """

    def __init__(self, layout: Layout, pool: HostPool, disk: DiskStore) -> None:
        super().__init__(layout)
        self.paths = len(disk.paths)
        self.disk = disk
        self._pool = pool
        self._written: set[int] = set()
        largest = max((b.size * DTYPES[b.dtype].itemsize for b in layout.buckets), default=0)
        self._buffer = pool.take(largest, torch.uint8, "buffers", "a bucket of weights (memory.weights)")
        for b in layout.buckets:
            disk.declare(_name(b.index), Form({TABLE: DTYPES[b.dtype]}, b.size), b.index)
        disk.reserve(1, "weights", "the weights")

    def home(self, bucket: int) -> None:
        """See :class:`WeightStore`."""
        return

    def fetch(self, bucket: int, path: int, target: Tensor) -> int:
        """See :class:`WeightStore`."""
        return self.disk.read(_name(bucket), path, {TABLE: target})

    def put(self, bucket: int, path: int, source: Tensor) -> int:
        """See :class:`WeightStore`."""
        return self.disk.write(_name(bucket), path, {TABLE: source})

    @contextmanager
    def visited(self, bucket: int, *, write: bool) -> Iterator[Tensor]:
        """See :class:`WeightStore`."""
        if write:
            self.withdraw()
        b = self.layout.buckets[bucket]
        dtype = DTYPES[b.dtype]
        weights = self._buffer[: b.size * dtype.itemsize].view(dtype)
        if bucket in self._written:
            self._each_path(self.fetch, bucket, weights)
        else:
            weights.zero_()
        yield weights
        if write:
            self._each_path(self.put, bucket, weights)
            self._written.add(bucket)

    def close(self) -> None:
        """See :class:`WeightStore`."""
        self._pool.give_back(self._buffer)
        self._buffer = self._buffer[:0]

    def _each_path(self, move: Callable[[int, int, Tensor], int], bucket: int, weights: Tensor) -> None:
        for path in range(self.paths):
            move(bucket, path, weights)


def places(buckets: Sequence[Bucket]) -> tuple[dict[int, tuple[int, int]], int]:
    """Where the parameters of a unit lie in its memory: index -> (first, end) element; and its elements.

    Buckets lie one behind the other, so a parameter that was cut is in one piece again.
    """
    found: dict[int, tuple[int, int]] = {}
    start = 0
    for bucket in buckets:
        for s in bucket.segments:
            first, end = found.get(s.parameter, (start + s.offset, start + s.offset))
            assert end == start + s.offset, (bucket.index, s)
            found[s.parameter] = first, start + s.end
        start += bucket.size
    return found, start


def _name(bucket: int) -> str:
    return f"weights-b{bucket:05}"
