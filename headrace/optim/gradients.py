"""Where gradients wait for the update: all in memory, or on the disk behind a few buffers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.memory.blocks import aligned
from headrace.memory.disk import DiskStore
from headrace.memory.parts import Form
from headrace.memory.pool import HostPool
from headrace.memory.weights import DTYPES
from headrace.schedule.layout import Bucket, Layout
from headrace.schedule.window import BUFFERS

TABLE = "gradients"
"""The one table of a bucket's file."""


def kept_dtypes(summed: bool) -> dict[str, torch.dtype]:
    """Training dtype -> the dtype in which its gradients wait: fp32 where micro-batches are summed."""
    return {name: torch.float32 if summed else dtype for name, dtype in DTYPES.items()}


class Gradients(ABC):
    """The gradients of every bucket.

    Args:
        dtypes: training dtype -> the dtype in which gradients wait.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        self.dtypes = dtypes

    @abstractmethod
    def of(self, bucket: Bucket, buffer: int | None) -> Tensor:
        """A bucket's gradient in memory, in a buffer if it has one: 1-D, ``bucket.size`` elements or more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class RamGradients(Gradients):
    """All gradients in memory.

    Args:
        layout: the buckets.
        dtypes: training dtype -> the dtype in which gradients wait.
        pool: hands out the memory.
    """

    def __init__(self, layout: Layout, dtypes: Mapping[str, torch.dtype], pool: HostPool) -> None:
        super().__init__(dtypes)
        self._pool = pool
        self._buckets: list[Tensor] = []
        try:
            for b in layout.buckets:
                what = f"gradients of bucket {b.index}"
                self._buckets.append(pool.take(b.size, dtypes[b.dtype], "gradients", what))
        except BaseException:
            self.close()
            raise

    def of(self, bucket: Bucket, buffer: int | None) -> Tensor:
        """See :class:`Gradients`."""
        assert buffer is None
        return self._buckets[bucket.index]

    def close(self) -> None:
        """See :class:`Gradients`."""
        while self._buckets:
            self._pool.give_back(self._buckets.pop())


class DiskGradients(Gradients):
    """Gradients on the disk, each in memory only as it arrives and for its update.

    They wait as they came, 2 bytes an element of bf16, and are widened by the update's kernel (Maurya et al.
    2025, MLP-Offload, delayed in-place conversion); sums of several micro-batches wait in fp32.

    Args:
        layout: the buckets.
        dtypes: training dtype -> the dtype in which gradients wait.
        pool: hands out the memory of the buffers.
        disk: keeps the gradients.

    Attributes:
        buffers: how many buckets are in memory at once.
    """

    def __init__(
        self, layout: Layout, dtypes: Mapping[str, torch.dtype], pool: HostPool, disk: DiskStore
    ) -> None:
        super().__init__(dtypes)
        self.disk = disk
        self.buffers = min(BUFFERS, len(layout.buckets))
        self._pool = pool
        self._taken: list[Tensor] = []
        largest = max((aligned(b.size * dtypes[b.dtype].itemsize) for b in layout.buckets), default=0)
        what = "a bucket of gradients on its way (memory.gradients)"
        try:
            while len(self._taken) < self.buffers:
                self._taken.append(pool.take(largest, torch.uint8, "buffers", what))
            for b in layout.buckets:
                disk.declare(_name(b), Form({TABLE: dtypes[b.dtype]}, b.size), b.index)
            disk.reserve(1, "gradients", "the gradients")
        except BaseException:
            self.close()
            raise

    def of(self, bucket: Bucket, buffer: int | None) -> Tensor:
        """See :class:`Gradients`."""
        assert buffer is not None, bucket.index
        return self._taken[buffer].view(self.dtypes[bucket.dtype])

    def read(self, bucket: Bucket, path: int, buffer: int | None) -> int:
        """Read a bucket's part from a path into a buffer; returns its bytes."""
        return self.disk.read(_name(bucket), path, {TABLE: self.of(bucket, buffer)})

    def write(self, bucket: Bucket, path: int, buffer: int | None) -> int:
        """Write a bucket's part from a buffer to a path; returns its bytes."""
        return self.disk.write(_name(bucket), path, {TABLE: self.of(bucket, buffer)})

    def close(self) -> None:
        """See :class:`Gradients`."""
        while self._taken:
            self._pool.give_back(self._taken.pop())


def _name(bucket: Bucket) -> str:
    return f"gradients-b{bucket.index:05}"
