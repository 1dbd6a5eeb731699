"""The one word for a piece of work: it prints, parses, belongs to a lane and waits for others.

``0F2`` is stage 0, forward, micro-batch 2; ``2F0s3`` adds slice 3; ``0U.b12`` updates bucket 12;
``0READ.b7@p1`` reads bucket 7 from path 1, ``0WRITE1.g7@p0`` writes its gradients after micro-batch 1.
The text form follows torch.distributed.pipelining and extends it by slice, unit and path.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    BACKWARD = "B"
    DOWN = "DOWN"  # gradients of a bucket leave the device
    NORM = "NORM"  # sums of squares of a bucket's gradients
    CLIP = "CLIP"  # global norm and clip factor: needs every NORM
    UPDATE = "U"  # the optimizer kernel over a bucket
    UP = "UP"  # new weights of a bucket come back to the device
    READ = "READ"
    WRITE = "WRITE"


_LANES = {
    Kind.FORWARD: "compute",
    Kind.BACKWARD: "compute",
    Kind.DOWN: "d2h",
    Kind.NORM: "cpu",
    Kind.CLIP: "compute",
    Kind.UPDATE: "cpu",
    Kind.UP: "h2d",
    Kind.READ: "read",
    Kind.WRITE: "write",
}
_ON_PATH = (Kind.READ, Kind.WRITE)
UNITS = {
    "b": "bucket",  # of gradients on their way and of states
    "g": "gradients of bucket",  # where they wait
    "w": "weights of bucket",
    "l": "layer",
    "a": "input of layer",
    "e": "embedding",  # e0 at the model's input, e1 at its output where the two are not one
}
"""Kinds of units, and what pictures call them."""
_TEXT = re.compile(rf"(\d+)([A-Z]+)(\d+)?(?:s(\d+))?(?:\.([{''.join(UNITS)}])(\d+))?(?:@p(\d+))?")


@dataclass(frozen=True, slots=True)
class Unit:
    """What an action works on inside its stage; see :data:`UNITS` for the kinds: ``b12``, ``l3``."""

    kind: str
    index: int

    def __post_init__(self) -> None:
        assert self.kind in UNITS and self.index >= 0, self

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


def bucket(index: int) -> Unit:
    """The unit of bucket ``index``."""
    return Unit("b", index)


def gradients(index: int) -> Unit:
    """The unit of the gradients of bucket ``index``, where they wait on the disk."""
    return Unit("g", index)


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work. The same work in another step is the same action; the step goes beside it."""

    kind: Kind
    stage: int = 0
    microbatch: int | None = None
    slice: int | None = None
    unit: Unit | None = None
    path: int | None = None

    def __post_init__(self) -> None:
        assert self.stage >= 0 and (self.microbatch is None or self.microbatch >= 0), self
        assert self.slice is None or self.slice >= 0, self
        assert (self.path is not None) == (self.kind in _ON_PATH), f"{self.kind} and a path go together"

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}"
        text += "" if self.microbatch is None else str(self.microbatch)
        text += "" if self.slice is None else f"s{self.slice}"
        text += "" if self.unit is None else f".{self.unit}"
        return text + ("" if self.path is None else f"@p{self.path}")

    @property
    def lane(self) -> str:
        """The lane that executes it: ``compute``, ``d2h``, ``cpu``, ``h2d``, ``read:p1``..."""
        lane = _LANES[self.kind]
        return lane if self.path is None else f"{lane}:p{self.path}"


def parse(text: str) -> Action:
    """The inverse of ``str(action)``.

    Raises ValueError for text that no action prints.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in Kind._value2member_map_:
        raise ValueError(f"{text!r} is not an action; written like 0F2, 2F0s3, 0U.b12 or 0READ.b7@p1")
    stage, kind, microbatch, slice_, unit_kind, unit_index, path = match.groups()
    if (path is not None) != (kind in _ON_PATH):
        raise ValueError(f"{text!r}: a path (@p0) belongs to READ and WRITE, and to no other kind")
    return Action(
        Kind(kind),
        int(stage),
        None if microbatch is None else int(microbatch),
        None if slice_ is None else int(slice_),
        None if unit_kind is None else Unit(unit_kind, int(unit_index)),
        None if path is None else int(path),
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """An action that must have ended: ``steps_back`` optimizer steps before the waiting one."""

    action: Action
    steps_back: int = 0


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the rules of waiting need to know of a step: its micro-batches and bucket numbers."""

    microbatches: int
    buckets: int


def waits(action: Action, step: StepShape) -> tuple[Wait, ...]:
    """What ``action`` must wait for by the rules of its kind, in a synchronous step.

    A backward with a unit (``0B1.b3``) is the moment in ``0B1`` at which the gradients of that bucket are
    complete. A policy that updates later replaces the rule of ``U`` and of the forward (see optim/policies).
    """
    return tuple(_RULES[action.kind](action, step))


def _forward(action: Action, step: StepShape) -> Iterable[Wait]:
    if action.microbatch:
        return [Wait(replace(action, kind=Kind.BACKWARD, microbatch=action.microbatch - 1))]
    return [Wait(Action(Kind.UP, action.stage, unit=bucket(b)), 1) for b in range(step.buckets)]


def _backward(action: Action, step: StepShape) -> Iterable[Wait]:
    return [Wait(replace(action, kind=Kind.FORWARD, unit=None))]


def _down(action: Action, step: StepShape) -> Iterable[Wait]:
    ready = [Wait(replace(action, kind=Kind.BACKWARD))]
    return [*ready, Wait(replace(action, kind=Kind.UPDATE, microbatch=None), 1)]


def _norm(action: Action, step: StepShape) -> Iterable[Wait]:
    return [Wait(replace(action, kind=Kind.DOWN, microbatch=m)) for m in range(step.microbatches)]


def _clip(action: Action, step: StepShape) -> Iterable[Wait]:
    return [Wait(replace(action, kind=Kind.NORM, unit=bucket(b))) for b in range(step.buckets)]


def _update(action: Action, step: StepShape) -> Iterable[Wait]:
    return [Wait(replace(action, kind=Kind.CLIP, unit=None))]


def _up(action: Action, step: StepShape) -> Iterable[Wait]:
    return [Wait(replace(action, kind=Kind.UPDATE))]


def _nothing(action: Action, step: StepShape) -> Iterable[Wait]:
    return []


_RULES = {
    Kind.FORWARD: _forward,
    Kind.BACKWARD: _backward,
    Kind.DOWN: _down,
    Kind.NORM: _norm,
    Kind.CLIP: _clip,
    Kind.UPDATE: _update,
    Kind.UP: _up,
    Kind.READ: _nothing,
    Kind.WRITE: _nothing,
}
