"""Rows of an embedding that lives off the device, without ever having the whole of it there.

Shapes: U different tokens, R rows of a piece, V vocabulary, D width.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from headrace.errors import UserError
from headrace.lanes.lanes import Event
from headrace.memory.tiers import Tiers
from headrace.memory.weights import DTYPES, WeightStore
from headrace.schedule.action import Action, Kind, Unit
from headrace.schedule.layout import Bucket

SLOTS = 2
"""Buckets of an embedding on the device: one that is used, one that comes."""


class Rows:
    """An embedding's rows, in pieces that pass through two slots of a bucket each.

    Args:
        parameter: its shape is [V, D].
        buckets: of the parameter alone, in the order of its elements.
        store: where they live.
        tiers: pools and lanes.

    Raises:
        UserError: a budget has no room for the slots.
    """

    def __init__(
        self, parameter: nn.Parameter, buckets: Sequence[Bucket], store: WeightStore, tiers: Tiers
    ) -> None:
        assert parameter.ndim == 2 and {len(bucket.segments) for bucket in buckets} == {1}
        self.parameter = parameter
        self._buckets = buckets
        self._store = store
        self._tiers = tiers
        self._width = parameter.shape[1]
        largest = max(bucket.size for bucket in buckets)
        dtype, what = DTYPES[buckets[0].dtype], "rows of an embedding (memory.embeddings)"
        self._slots = [tiers.device_pool.take(largest, dtype, "weights", what) for _ in range(SLOTS)]
        self._bounces: list[Tensor] = []
        if store.paths and tiers.apart:
            self._bounces = [tiers.pool.take(largest, dtype, "buffers", what) for _ in range(SLOTS)]
        self._ends: list[list[Event]] = [[] for _ in range(SLOTS)]
        self._absent = parameter.data
        self._uses = 0

    def close(self) -> None:
        """Give the slots back."""
        while self._slots:
            self._tiers.device_pool.give_back(self._slots.pop())
        while self._bounces:
            self._tiers.pool.give_back(self._bounces.pop())

    def settle(self) -> None:
        """Wait until nothing is on its way into the slots."""
        for ends in self._ends:
            for event in ends:
                self._tiers.lanes.wait(event)

    def storages(self) -> list[torch.UntypedStorage]:
        """The slots' memory."""
        return [slot.untyped_storage() for slot in self._slots]

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """All rows in turn: the first row's number, and rows [R, D] that stand until the next are asked for.

        A row that was cut between two buckets is a piece of its own.
        """
        unit, start = self._buckets[0].unit, 0
        assert unit is not None
        tail = self._slots[0][:0]
        for number, bucket in enumerate(self._buckets):
            for coming in (number, number + 1):
                if coming == number + 1 < len(self._buckets) or number == coming == 0:
                    self._ends[coming % SLOTS] = self._fetch(unit, coming)
            for event in self._ends[number % SLOTS]:
                self._tiers.lanes.wait(event)
            (segment,) = bucket.segments
            flat = self._slots[number % SLOTS][: segment.numel]
            missing = -start % self._width  # of the row that the bucket before has begun
            if missing:
                yield start // self._width, torch.cat([tail, flat[:missing]])[None]
            rows, rest = divmod(len(flat) - missing, self._width)
            if rows:
                first = (start + missing) // self._width
                yield first, flat[missing : missing + rows * self._width].view(rows, self._width)
            tail = flat[len(flat) - rest :].clone()
            start += len(flat)

    def gathered(self, ids_U: Tensor) -> Tensor:
        """The rows [U, D] of different tokens."""
        found_UD = self._slots[0].new_empty(len(ids_U), self._width)
        for first, rows_RD in self.pieces():
            here_U = (ids_U >= first) & (ids_U < first + len(rows_RD))
            found_UD[here_U] = rows_RD[ids_U[here_U] - first]
        return found_UD

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The parameter has all of its rows inside: for a moment in which there is room for them."""
        if not self._uses:
            found_VD = self._slots[0].new_empty(self.parameter.shape)
            for first, rows_RD in self.pieces():
                found_VD[first : first + len(rows_RD)] = rows_RD
            self.parameter.data = found_VD
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self.parameter.data = self._absent

    def looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a lookup needs: tokens [U], their rows [U, D], and each token's place among them.

        The rows pass their gradient on, as a sparse one of the parameter.
        """
        ids_U, places = ids.unique(return_inverse=True)
        return ids_U, _Gathered.apply(self.parameter, ids_U, self.gathered(ids_U)), places

    def _fetch(self, unit: Unit, number: int) -> list[Event]:
        bucket, slot, lanes = self._buckets[number], number % SLOTS, self._tiers.lanes
        before, memory = self._ends[slot], self._slots[slot][: bucket.size]
        if not self._store.paths:
            work = lambda: self._store.fetch(bucket.index, 0, memory)  # noqa: E731
            return [lanes.submit(Action(Kind.UP, unit=unit), work, before)]
        landing = self._bounces[slot][: bucket.size] if self._bounces else memory
        reads = [
            lanes.submit(
                Action(Kind.READ, unit=unit, path=path),
                lambda path=path: self._store.fetch(bucket.index, path, landing),  # type: ignore[misc]
                before,
            )
            for path in range(self._store.paths)
        ]
        if landing is memory:
            return reads

        def up() -> int:
            memory.copy_(landing, non_blocking=True)
            return memory.nbytes

        return [lanes.submit(Action(Kind.UP, unit=unit), up, reads)]


def look_up_rows(embedding: nn.Embedding, rows: Rows) -> Iterator[RemovableHandle]:
    """Let an embedding look tokens up among the rows of those that it is given; its code stays as it is."""
    own: list[Any] = []

    def before(module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids_U, rows_UD, places = rows.looked_up(args[0])
        own[:] = [module._parameters.pop("weight"), module.padding_idx]
        module.weight = rows_UD
        if module.padding_idx is not None:  # its gradient is zero
            place = (ids_U == module.padding_idx).nonzero()
            module.padding_idx = int(place[0]) if len(place) else None
        return (places, *args[1:])

    def after(module: nn.Embedding, *_: Any) -> None:
        if own:
            del module.weight
            module._parameters["weight"], module.padding_idx = own
            own.clear()

    yield embedding.register_forward_pre_hook(before)
    yield embedding.register_forward_hook(after, always_call=True)


def whole_for_a_moment(head: nn.Module, rows: Rows) -> Iterator[RemovableHandle]:
    """Where the head itself is called, to generate or to be probed, it has all of its rows while it runs."""
    under_way: list[AbstractContextManager[None]] = []

    def before(*_: Any) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "the output embedding comes by rows, so a loss cannot be computed from all logits: set "
                "memory.embeddings=whole, or compute under torch.no_grad()"
            )
        under_way.append(rows.whole())
        under_way[-1].__enter__()

    def after(*_: Any) -> None:
        if under_way:
            under_way.pop().__exit__(None, None, None)

    yield head.register_forward_pre_hook(before)
    yield head.register_forward_hook(after, always_call=True)


class _Gathered(torch.autograd.Function):
    """Rows of a parameter that is not there; its gradient is sparse, rows alone."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, ids_U: Tensor, rows_UD: Tensor) -> Tensor:
        ctx.save_for_backward(ids_U)
        ctx.shape = parameter.shape
        return rows_UD.view_as(rows_UD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (ids_U,) = ctx.saved_tensors
        gradient = torch.sparse_coo_tensor(
            ids_U[None], grad_output, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None
