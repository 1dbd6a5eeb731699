"""Puts reads and writes of gradients, which wait on the disk, around what a policy does with them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from headrace.optim.home import leaves_staging
from headrace.optim.policies.base import Emission, Place
from headrace.schedule.action import Action, Kind, Wait, bucket, gradients


class Waiting:
    """A pass over a step's emissions, for gradients on the disk.

    Buffers serve in turn. Whoever wants one waits for all that worked in it before; and since every action
    waits only for earlier ones, in lanes that keep their order, nobody waits for ever.

    Args:
        buffers: of gradients in host memory.
        paths: disk paths; every bucket has a part on each.
    """

    def __init__(self, buffers: int, paths: int) -> None:
        self._paths = range(paths)
        self._users: list[tuple[int, list[Action]]] = [(0, []) for _ in range(buffers)]  # step, actions
        self._turn = 0
        self._newest: dict[int, int] = {}  # bucket -> the micro-batch after which it was written

    def arriving(self, emissions: Iterable[Emission], step: int) -> Iterator[Emission]:
        """What a policy does with a bucket's gradients of a micro-batch.

        The sum so far is read, they are added, the blocks of the norm are summed, and the new sum is written.
        """
        for emission in emissions:
            if emission.action.kind is Kind.DOWN:
                yield from self._down(emission, step)
            else:
                yield emission

    def around(self, emissions: Iterable[Emission], step: int) -> Iterator[Emission]:
        """What a policy does in the update: gradients are read before it, and no norm needs them once more.

        Nothing is decided before the first update is asked for: a step that is skipped leaves no trace.
        """
        buffers: dict[int, int] = {}
        for emission in emissions:
            action, unit = emission.action, emission.action.unit
            if action.kind is Kind.CLIP:
                norms = (Action(Kind.NORM, microbatch=m, unit=bucket(b)) for b, m in self._newest.items())
                yield replace(emission, after=(*emission.after, *map(Wait, norms)))
            elif action.kind is Kind.UPDATE:
                assert unit is not None
                buffers[unit.index] = self._turn
                yield from self._update(emission, unit.index, step)
            elif unit is not None and leaves_staging(action):
                self._users[buffers[unit.index]][1].append(action)
                yield _placed(emission, buffers[unit.index])
            elif action.kind is not Kind.NORM:
                yield emission

    def next_step(self) -> None:
        """Forget what was written: the next step begins anew."""
        self._newest.clear()

    def _down(self, down: Emission, step: int) -> Iterator[Emission]:
        microbatch, unit = down.action.microbatch, down.action.unit
        assert microbatch is not None and unit is not None
        buffer, free = self._take(step)
        reads: tuple[Wait, ...] = ()
        if unit.index in self._newest:
            yield from self._read(unit.index, microbatch, free, buffer)
            reads = self._moves(Kind.READ, unit.index, microbatch)
        self._newest[unit.index] = microbatch
        yield _placed(replace(down, after=(*down.after, *free, *reads)), buffer)
        norm = Action(Kind.NORM, microbatch=microbatch, unit=unit)
        yield Emission(norm, (Wait(down.action),), place=Place(gradient=buffer))
        # The update of the step before may still read what is written over.
        after = Wait(down.action), *self._moves(Kind.READ, unit.index, None, 1)
        writes = self._moves(Kind.WRITE, unit.index, microbatch)
        yield from (Emission(write.action, after, place=Place(gradient=buffer)) for write in writes)
        self._users[buffer] = step, [norm, *(write.action for write in writes)]

    def _update(self, update: Emission, index: int, step: int) -> Iterator[Emission]:
        buffer, free = self._take(step)
        yield from self._read(index, None, free, buffer)
        reads = self._moves(Kind.READ, index, None)
        yield _placed(replace(update, after=(*update.after, *reads)), buffer)
        self._users[buffer] = step, [update.action]

    def _read(
        self, index: int, microbatch: int | None, free: Sequence[Wait], buffer: int
    ) -> Iterator[Emission]:
        """Read what was written last, into a buffer once it is free."""
        written = self._moves(Kind.WRITE, index, self._newest[index])
        reads = self._moves(Kind.READ, index, microbatch)
        for read, write in zip(reads, written, strict=True):
            yield Emission(read.action, (*free, write), place=Place(gradient=buffer))

    def _moves(self, kind: Kind, index: int, microbatch: int | None, steps_back: int = 0) -> tuple[Wait, ...]:
        unit = gradients(index)
        actions = (Action(kind, microbatch=microbatch, unit=unit, path=path) for path in self._paths)
        return tuple(Wait(action, steps_back) for action in actions)

    def _take(self, step: int) -> tuple[int, tuple[Wait, ...]]:
        """The buffer whose turn it is, and what must have ended before it is free."""
        buffer = self._turn
        self._turn = (buffer + 1) % len(self._users)
        then, users = self._users[buffer]
        return buffer, tuple(Wait(user, step - then) for user in users)


def _placed(emission: Emission, buffer: int) -> Emission:
    return replace(emission, place=replace(emission.place, gradient=buffer))
