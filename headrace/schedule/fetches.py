"""Which units of weights are on the device while a model computes. Pure decisions: no tensor.

A model's parts are used in a known order, forward and then backward: the input embedding, the layers, the
output embedding, the layers again. The next ones are fetched while one is used, and what is used last leaves
first; so at the turn from forward to backward the last layers are there already.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.schedule.action import Unit

AHEAD = 1
"""Layers that are fetched while one is used."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a unit into a slot of its shelf."""

    unit: Unit
    slot: int


class Shelf:
    """Slots of one size, and the units in them.

    Args:
        units: that may be here.
        slots: how many at once.
    """

    def __init__(self, units: Sequence[Unit], slots: int) -> None:
        self.units = frozenset(units)
        self.slots = min(slots, len(self.units))
        self._held: dict[Unit, int] = {}
        self._in_use: set[Unit] = set()

    def slot(self, unit: Unit) -> int | None:
        """Where a unit is, if it is here."""
        return self._held.get(unit)

    def use(self, unit: Unit) -> None:
        """Keep a unit where it is until it is released."""
        assert unit in self._held, unit
        self._in_use.add(unit)

    def release(self, unit: Unit) -> None:
        """Let a unit leave when its slot is wanted."""
        self._in_use.discard(unit)

    def clear(self) -> None:
        """Forget everything: what is here is old."""
        assert not self._in_use, self._in_use
        self._held.clear()

    def wanted(self, coming: Sequence[Unit]) -> Iterator[Fetch]:
        """Fetch as many of the units that come next as there is room for, the first of them first.

        A unit that is not among them, and is not in use, makes room.
        """
        kept: list[Unit] = []
        for unit in coming:
            room = self.slots - len(kept) - len(self._in_use.difference(kept, [unit]))
            if unit in self.units and unit not in kept and room > 0:
                kept.append(unit)
        for unit in kept:
            if unit not in self._held:
                yield self._fetch(unit, kept)

    def _fetch(self, unit: Unit, kept: Sequence[Unit]) -> Fetch:
        free = next((slot for slot in range(self.slots) if slot not in self._held.values()), None)
        if free is None:
            leaving = next(u for u in self._held if u not in kept and u not in self._in_use)
            free = self._held.pop(leaving)
        self._held[unit] = free
        return Fetch(unit, free)


class Passage:
    """The order in which a model's units are used.

    Args:
        first: of the model, before the layers: the input embedding, if it is streamed.
        layers: in the order of the forward.
        last: after them: the output embedding, if it is streamed; it may be the first again.
    """

    def __init__(self, first: Unit | None, layers: Sequence[Unit], last: Unit | None) -> None:
        self._forward = [unit for unit in (first, *layers, last) if unit is not None]
        self._backward = list(reversed(layers))
        self._at = {unit: index for index, unit in enumerate(self._forward) if unit.kind == "l"}

    def first(self, trains: bool) -> list[Unit]:
        """What a forward uses, from its begin; and its backward, if there will be one."""
        return self._forward + (self._backward if trains else [])

    def layer(self, unit: Unit, trains: bool) -> list[Unit]:
        """A layer and what comes after it in a forward."""
        return self.first(trains)[self._at[unit] :]

    def last(self, trains: bool) -> list[Unit]:
        """The end of a forward."""
        return self._forward[-1:] + (self._backward if trains else [])

    def fetched(self, shelves: Sequence[Shelf], microbatches: int) -> Counter[Unit]:
        """How often each unit is fetched in a step of training that finds nothing on the shelves."""
        found: Counter[Unit] = Counter()
        in_use: list[Unit] = []

        def use(unit: Unit, coming: Sequence[Unit]) -> None:
            for shelf in shelves:
                found.update(fetch.unit for fetch in shelf.wanted(coming))
                if unit in shelf.units:
                    shelf.use(unit)
                    in_use.append(unit)

        def release() -> None:
            while in_use:
                for shelf in shelves:
                    shelf.release(in_use[-1])
                in_use.pop()

        for _ in range(microbatches):
            for unit in self._forward[:1] if self._forward[0].kind == "e" else ():
                use(unit, self.first(True))
                release()
            for unit in self._at:
                use(unit, self.layer(unit, True))
                release()
            if self._forward[-1].kind == "e":
                use(self._forward[-1], self.last(True))
            for unit in self._backward:
                release()
                use(unit, self.backward(unit))
            release()
        return found

    def backward(self, unit: Unit) -> list[Unit]:
        """A layer and what comes after it in a backward."""
        return self._backward[self._backward.index(unit) :]
