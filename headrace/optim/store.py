"""The host tier of the optimizer: gradients and work buffers in flat buckets, and the states beside them."""

import torch
from torch import Tensor

from headrace.memory.pool import HostPool
from headrace.memory.weights import DTYPES, WeightStore
from headrace.optim.gradients import Gradients
from headrace.optim.kernel import CHUNK, BucketTensors
from headrace.optim.policies.base import Place
from headrace.optim.states import States
from headrace.schedule.layout import BLOCK, Bucket, Layout

STAGING = 2
"""Buffers in which new weights wait for the way back where gradients are summed in another dtype."""


class HostStore:
    """All host buffers of an optimizer, taken from the pool at once so that a refusal comes at the start.

    Args:
        layout: the buckets.
        states: master weights and moments; they belong to this object from now on.
        gradients: where they wait for the update; they belong to this object from now on.
        pool: hands out the buffers within the budget.
        capacity: elements of the largest bucket.
        summed: whether gradients of several micro-batches are summed here, in fp32.
        landing: whether gradients must land in a buffer before they can be summed (CUDA).
        workers: threads of the kernel, each with scratch of its own.
        off: the home of weights that are off the device.
    """

    def __init__(
        self,
        layout: Layout,
        states: States,
        gradients: Gradients,
        pool: HostPool,
        *,
        capacity: int,
        summed: bool,
        landing: bool,
        workers: int,
        off: WeightStore | None = None,
    ) -> None:
        self.layout = layout
        self.off = off
        self.states = states
        self.gradients = gradients
        self.budget = pool.budget
        self._pool = pool
        self._taken: list[Tensor] = []
        try:
            self._take_all(capacity, summed, landing, workers)
        except BaseException:
            self.close()
            raise

    def _take_all(self, capacity: int, summed: bool, landing: bool, workers: int) -> None:
        layout = self.layout
        sizes = {d: min(capacity, layout.size_of(d)) for d in sorted({b.dtype for b in layout.buckets})}
        self.staging = {
            d: [self._buffer(n, DTYPES[d], "new weights") for _ in range(STAGING)]
            for d, n in sizes.items()
            if self.gradients.dtypes[d] != DTYPES[d]
        }
        self.landing = {
            d: self._buffer(n, DTYPES[d], "arriving gradients")
            for d, n in sizes.items()
            if landing and summed
        }
        self.chunks = [self._buffer(CHUNK, torch.float32, "kernel scratch") for _ in range(workers)]
        self.blocks = [self._buffer(BLOCK, torch.float64, "norm scratch") for _ in range(workers)]

    def staging_of(self, bucket: Bucket) -> tuple[str, int] | None:
        """Which staging buffer takes the bucket's new weights: its dtype and number; None where none does."""
        if self._home(bucket) is not None or bucket.dtype not in self.staging:
            return None
        return bucket.dtype, bucket.index % STAGING

    def staged(self, bucket: Bucket, place: Place) -> Tensor:
        """The bucket's new weights while they wait for the way back, in the training dtype.

        Where gradients have that dtype too they lie in place of the gradients, which are not needed then: so
        they take no memory, and their cache lines need not be fetched. Weights that live in host memory are
        written where they live.
        """
        if (home := self._home(bucket)) is not None:
            return home
        staging = self.staging_of(bucket)
        if staging is None:
            return self.gradients.of(bucket, place.gradient)
        dtype, number = staging
        return self.staging[dtype][number][: bucket.size]

    def bucket(self, bucket: Bucket, place: Place) -> BucketTensors:
        """What the kernel needs of a bucket, which is all in memory or has a place there."""
        tables = self.states.tables(bucket, place.states)
        return BucketTensors(
            tables["master"],
            tables["exp_avg"],
            tables["exp_avg_sq"],
            self.gradients.of(bucket, place.gradient),
            self.staged(bucket, place),
        )

    def close(self) -> None:
        """Give every buffer back to the pool, and keep none."""
        while self._taken:
            self._pool.give_back(self._taken.pop())
        self.states.close()
        self.gradients.close()
        self.staging, self.landing = {}, {}
        self.chunks, self.blocks = [], []

    def _home(self, bucket: Bucket) -> Tensor | None:
        return self.off.home(bucket.index) if self.off is not None and bucket.unit is not None else None

    def _take(self, numel: int, dtype: torch.dtype, purpose: str, what: str) -> Tensor:
        self._taken.append(self._pool.take(numel, dtype, purpose, what))
        return self._taken[-1]

    def _buffer(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        return self._take(numel, dtype, "buffers", what)
