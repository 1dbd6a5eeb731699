"""Weights off the device: a model's layers are there for their forward and their backward only.

Hooks bring each layer's weights before it is used and let them go after it, while the next ones are on their
way (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.1 and overlap-centric design). The model's own code
stays as it is: between two uses its parameters are there by shape alone.

Layers must be recomputed in backward (:func:`~headrace.models.recompute.recompute_layers` with
:attr:`Streamed.contexts`): so nothing that autograd keeps refers to weights that have left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.errors import RunStopped, UserError
from headrace.lanes.lanes import Event
from headrace.memory.tiers import Tiers
from headrace.memory.weights import WeightStore, places
from headrace.models.documents import Contexts
from headrace.models.homes import INPUT, OUTPUT, streamed_units
from headrace.models.rows import Rows, look_up_rows, whole_for_a_moment
from headrace.schedule.action import Action, Kind, Unit
from headrace.schedule.fetches import AHEAD, Passage, Shelf
from headrace.schedule.layout import Bucket


@dataclass
class _Place:
    """Where a parameter lies in its unit's memory, in elements, and what stands for it meanwhile."""

    parameter: nn.Parameter
    first: int
    end: int
    absent: Tensor

    def bind(self, memory: Tensor) -> None:
        self.parameter.data = memory[self.first : self.end].view(self.absent.shape)

    def unbind(self) -> None:
        self.parameter.data = self.absent


class _Slots:
    """The memory of a shelf: device memory, and host memory on the way from a disk to another tier."""

    def __init__(
        self, shelf: Shelf, sizes: Mapping[Unit, int], dtype: torch.dtype, tiers: Tiers, from_disk: bool
    ) -> None:
        self.shelf = shelf
        largest = max(sizes[unit] for unit in shelf.units)
        self._tiers = tiers
        self.bounces: list[Tensor] = []
        what = "a layer's weights on the device (memory.weights)"
        self.memory = [tiers.device_pool.take(largest, dtype, "weights", what) for _ in range(shelf.slots)]
        if from_disk and tiers.apart:
            what = "a layer's weights on their way from the disk (memory.weights)"
            self.bounces = [tiers.pool.take(largest, dtype, "buffers", what) for _ in range(shelf.slots)]
        self.events: list[list[Event]] = [[] for _ in range(shelf.slots)]

    def close(self) -> None:
        while self.memory:
            self._tiers.device_pool.give_back(self.memory.pop())
        while self.bounces:
            self._tiers.pool.give_back(self.bounces.pop())


class Streamed:
    """Streams a model's weights between their store and the device while it computes.

    Args:
        model: with placeholders for the parameters of the store.
        store: their home; filled.
        tiers: budgets, pools and lanes.
        ahead: layers fetched while one is used; one more is on the device.
        by_rows: whether embeddings come by rows, instead of whole.

    Attributes:
        contexts: of each layer, for ``of_layers`` of :func:`~headrace.models.recompute.recompute_layers`.

    Raises:
        UserError: the budget of the device has no room for the layers in flight.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        tiers: Tiers,
        *,
        ahead: int = AHEAD,
        by_rows: bool = False,
    ) -> None:
        self.store = store
        self._tiers = tiers
        self._lanes = tiers.lanes
        self._in_use: list[Unit] = []
        self._coming: list[Unit] = []
        self._pass = True, tiers.lanes.step
        parameters = dict(model.named_parameters())
        self._buckets: dict[Unit, list[Bucket]] = {}
        self._places: dict[Unit, list[_Place]] = {}
        sizes: dict[Unit, int] = {}
        for unit in dict.fromkeys(b.unit for b in store.layout.buckets if b.unit is not None):
            self._buckets[unit] = store.layout.of_unit(unit)
            found, sizes[unit] = places(self._buckets[unit])
            named = [(store.layout.parameters[index].name, span) for index, span in found.items()]
            self._places[unit] = [_Place(parameters[n], *span, parameters[n].data) for n, span in named]
        dtype = model.dtype
        units = streamed_units(model)
        layers = [unit for unit in units if unit.kind == "l" and unit in sizes]
        ends = [unit for unit in units if unit.kind == "e" and unit in sizes]
        self._rows: dict[Unit, Rows] = {}
        for unit in ends if by_rows else ():
            (place,) = self._places.pop(unit)
            self._rows[unit] = Rows(place.parameter, self._buckets[unit], store, tiers)
        ends = [] if by_rows else ends
        self._first = INPUT if INPUT in ends else None
        self._last = OUTPUT if OUTPUT in units else INPUT
        self._passage = Passage(self._first, layers, self._last if self._last in ends else None)
        self._slots: list[_Slots] = []
        for shelf in (Shelf(layers, 1 + ahead), Shelf(ends, 1)):
            if shelf.units:
                self._slots.append(_Slots(shelf, sizes, dtype, tiers, store.paths > 0))
        store.withdraw = self.withdraw
        self.contexts: dict[nn.Module, Contexts] = {
            units[unit][0]: partial(self._contexts, unit) for unit in layers
        }
        self._handles = list(self._hooks(model, units))

    # -- what others ask for ---------------------------------------------------------------------------

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory in which weights are while they are used."""
        slots = [memory.untyped_storage() for slots in self._slots for memory in slots.memory]
        return [*slots, *(storage for rows in self._rows.values() for storage in rows.storages())]

    @property
    def head_rows(self) -> Callable[[], Iterator[tuple[int, Tensor]]] | None:
        """Gives the rows of the output embedding, where they come in pieces: see ``training.row_loss``."""
        return self._rows[self._last].pieces if self._last in self._rows else None

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Tensor] | None:
        """Elements ``start:stop`` of a streamed parameter from its store, 1-D; None for any other tensor."""
        name = name.replace(".base_layer.", ".")  # beside adapters
        index = next((i for i, p in enumerate(self.store.layout.parameters) if p.name == name), None)
        return None if index is None else self._pieces(index, start, stop)

    def whole_head(self) -> AbstractContextManager[None]:
        """The output embedding is whole inside, where it comes by rows: to probe it before training."""
        return self._rows[self._last].whole() if self._last in self._rows else nullcontext()

    def withdraw(self) -> None:
        """Give up everything that is on the device or on its way there: the weights will be others."""
        self._release_all()
        for slots in self._slots:
            for events in slots.events:
                for event in events:
                    self._lanes.wait(event)
                events.clear()
            slots.shelf.clear()
        for rows in self._rows.values():
            rows.settle()

    def close(self) -> None:
        """Remove the hooks and give the device's memory back; the parameters stay placeholders."""
        for handle in self._handles:
            handle.remove()
        with suppress(RunStopped):  # of a fetch that failed: whoever waited for it has said so
            self.withdraw()
        for slots in self._slots:
            slots.close()
        for rows in self._rows.values():
            rows.close()

    # -- hooks -----------------------------------------------------------------------------------------

    def _hooks(
        self, model: PreTrainedModel, units: Mapping[Unit, Sequence[nn.Module]]
    ) -> Iterator[torch.utils.hooks.RemovableHandle]:
        for unit, (module, *_) in units.items():
            if unit.kind == "l" and unit in self._places:
                yield module.register_forward_pre_hook(partial(self._before_layer, unit))
                yield module.register_forward_hook(partial(self._after_layer, unit), always_call=True)
        if self._first is not None:
            embedding = model.get_input_embeddings()
            yield embedding.register_forward_pre_hook(lambda *_: self._use(INPUT, self._coming))
            yield embedding.register_forward_hook(lambda *_: self._release(INPUT), always_call=True)
        if INPUT in self._rows:
            yield from look_up_rows(model.get_input_embeddings(), self._rows[INPUT])
        if self._last in self._rows:
            yield from whole_for_a_moment(model.get_output_embeddings(), self._rows[self._last])
        # Whoever calls the decoder needs the output embedding next, by its module or by its weight alone.
        decoder = model.get_decoder()
        yield decoder.register_forward_pre_hook(lambda *_: self._begin())
        yield decoder.register_forward_hook(lambda *_: self._use_last())

    def _begin(self) -> None:
        self._release_all()
        trains = torch.is_grad_enabled()
        now = trains, self._lanes.step
        if now != self._pass:  # what a step fetches does not depend on others before it
            self.withdraw()
        self._pass = now
        self._coming = self._passage.first(trains)

    def _before_layer(self, unit: Unit, layer: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._use(unit, self._passage.layer(unit, trains=False))
        elif not (layer.training and layer.gradient_checkpointing):
            raise UserError(
                "a layer whose weights are not on the device ran with gradients and is not recomputed in "
                "backward: train with memory.activations=recompute, or compute under torch.no_grad()"
            )

    def _after_layer(self, unit: Unit, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(unit)

    def _contexts(self, unit: Unit) -> tuple[AbstractContextManager, AbstractContextManager]:
        return self._forward(unit), self._recomputation(unit)

    @contextmanager
    def _forward(self, unit: Unit) -> Iterator[None]:
        self._use(unit, self._passage.layer(unit, trains=True))
        yield
        self._release(unit)

    @contextmanager
    def _recomputation(self, unit: Unit) -> Iterator[None]:
        self._release_all(but=unit)  # the layers behind it have gone backward
        self._use(unit, self._passage.backward(unit))
        yield

    def _use_last(self) -> None:
        if self._last in self._places:
            self._use(self._last, self._passage.last(torch.is_grad_enabled()))

    # -- coming and going ------------------------------------------------------------------------------

    def _use(self, unit: Unit, coming: Sequence[Unit]) -> None:
        fetches = [(slots, fetch) for slots in self._slots for fetch in slots.shelf.wanted(coming)]
        for slots, fetch in sorted(fetches, key=lambda found: coming.index(found[1].unit)):
            slots.events[fetch.slot] = self._fetch(slots, fetch.unit, fetch.slot)
        slots = self._slots_of(unit)
        slot = slots.shelf.slot(unit)
        assert slot is not None, unit
        slots.shelf.use(unit)
        if unit not in self._in_use:
            self._in_use.append(unit)
        for event in slots.events[slot]:
            self._lanes.wait(event)
        for place in self._places[unit]:
            place.bind(slots.memory[slot])

    def _release(self, unit: Unit) -> None:
        if unit in self._in_use:
            self._in_use.remove(unit)
            self._slots_of(unit).shelf.release(unit)
            for place in self._places[unit]:
                place.unbind()

    def _release_all(self, but: Unit | None = None) -> None:
        for unit in [unit for unit in self._in_use if unit != but]:
            self._release(unit)

    def _fetch(self, slots: _Slots, unit: Unit, slot: int) -> list[Event]:
        """Submit what brings a unit into a slot, after what is still on its way there."""
        before, memory = slots.events[slot], slots.memory[slot]
        if not self.store.paths:
            return [self._submit(Action(Kind.UP, unit=unit), memory, before)]
        landing = slots.bounces[slot] if slots.bounces else memory
        reads = [
            self._submit(Action(Kind.READ, unit=unit, path=path), landing, before)
            for path in range(self.store.paths)
        ]
        if landing is memory:
            return reads

        def up() -> int:
            size = sum(bucket.size for bucket in self._buckets[unit])
            memory[:size].copy_(landing[:size], non_blocking=True)
            return size * memory.itemsize

        return [self._lanes.submit(Action(Kind.UP, unit=unit), up, reads)]

    def _submit(self, action: Action, memory: Tensor, after: Sequence[Event]) -> Event:
        unit, path = action.unit, action.path or 0
        assert unit is not None

        def fetch() -> int:
            moved, start = 0, 0
            for bucket in self._buckets[unit]:
                moved += self.store.fetch(bucket.index, path, memory[start : start + bucket.size])
                start += bucket.size
            return moved

        return self._lanes.submit(action, fetch, after)

    def _slots_of(self, unit: Unit) -> _Slots:
        return next(slots for slots in self._slots if unit in slots.shelf.units)

    def _pieces(self, index: int, start: int, stop: int) -> Iterator[Tensor]:
        for bucket, s in self.store.layout.places(index):
            low, high = max(start, s.start), min(stop, s.stop)
            if low < high:
                with self.store.visited(bucket, write=False) as weights:
                    yield weights[s.offset + low - s.start : s.offset + high - s.start]
