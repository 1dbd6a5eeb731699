"""Puts reads and writes of states around the updates that a policy emits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.optim.policies.base import Emission, Place
from headrace.schedule.action import Action, Kind, Wait, bucket
from headrace.schedule.window import Read, Update, Window, Write


class Streaming:
    """A pass over a step's emissions, for states on the disk.

    Args:
        window: decides what is in memory.
        paths: disk paths; every bucket has a part on each.
    """

    def __init__(self, window: Window, paths: int) -> None:
        self._window = window
        self._paths = range(paths)

    def ordered(self, buckets: Sequence[int]) -> list[int]:
        """Buckets in the direction of this step."""
        return self._window.ordered(buckets)

    def ahead(self, buckets: int, step: int) -> Iterator[Emission]:
        """Reads that can begin while backward runs."""
        for move in self._window.ahead(self._window.ordered(range(buckets))):
            yield from self._read(move, step)

    def around(self, emissions: Sequence[Emission], step: int) -> Iterator[Emission]:
        """The emissions of a policy, bucket by bucket in order, with reads before and writes after.

        Nothing is decided before the first update is asked for: a step that is skipped leaves no trace.
        """
        groups: dict[int, list[Emission]] = {}
        for emission in emissions:
            unit = emission.action.unit
            if unit is None or emission.action.kind is Kind.NORM:
                yield emission
            else:
                groups.setdefault(unit.index, []).append(emission)
        for move in self._window.step(list(groups), step):
            match move:
                case Read():
                    yield from self._read(move, step)
                case Update():
                    yield from self._updated(move, groups[move.bucket])
                case Write():
                    yield from self._write(move)

    def _read(self, move: Read, step: int) -> Iterator[Emission]:
        after: tuple[Wait, ...] = ()
        if move.after is not None:
            left, then = move.after
            writes = (Action(Kind.WRITE, unit=bucket(left), path=path) for path in self._paths)
            after = tuple(Wait(write, step - then) for write in writes)
        for path in self._paths:
            # The newest bytes of a bucket may themselves be on their way still.
            written = Wait(Action(Kind.WRITE, unit=bucket(move.bucket), path=path), 1)
            action = Action(Kind.READ, unit=bucket(move.bucket), path=path)
            yield Emission(action, (*after, written), place=Place(move.place))

    def _updated(self, move: Update, emissions: Sequence[Emission]) -> Iterator[Emission]:
        reads = tuple(
            Wait(Action(Kind.READ, unit=bucket(move.bucket), path=path)) for path in self._paths if move.read
        )
        place = Place(move.place)
        for emission in emissions:
            first = emission.action.kind is Kind.UPDATE
            yield replace(emission, after=(*emission.after, *reads), place=place) if first else emission

    def _write(self, move: Write) -> Iterator[Emission]:
        update = Wait(Action(Kind.UPDATE, unit=bucket(move.bucket)))
        for path in self._paths:
            action = Action(Kind.WRITE, unit=bucket(move.bucket), path=path)
            # Written while the next step's gradients are made; whoever reads the place or the bucket waits.
            yield Emission(action, (update,), visible=1, place=Place(move.place))
