"""What an update policy decides, as the actions of a step. The engine only executes them.

For every bucket a policy answers four questions:

- *where* it is updated: the lane of the action that it emits;
- *when* that may start: ``Emission.after``;
- *when* its result is visible: ``Emission.visible``, in step boundaries from now;
- *which bytes* move: what the executor of the action copies, and books.

A policy names its own state tables, and may bring executors of its own: to cut a bucket into pieces, to
encode what travels, to undo an update, or for kinds of action that the engine does not know.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.schedule.action import Action, Kind, StepShape, Wait
from headrace.schedule.layout import Bucket

if TYPE_CHECKING:
    from headrace.optim.engine import Engine


@dataclass(frozen=True, slots=True)
class Place:
    """Where in memory a bucket is of which most lies on the disk.

    Attributes:
        states: its place in the window of states; None where all are in memory.
        gradient: the buffer that its gradient is in; None where all are in memory.
    """

    states: int | None = None
    gradient: int | None = None


Executor = Callable[["Engine", Action, Place], int]
"""Does the work of an action on its lane, with what is in a place, and returns the bytes that it moved."""


@dataclass(frozen=True, slots=True)
class Emission:
    """An action to execute.

    Attributes:
        after: what must have ended before it starts.
        visible: how many step boundaries later its result may be seen; 0 is the end of its own step. A run
            waits at that boundary until it has ended, so results do not depend on the machine's speed.
        place: where the bucket's states and gradient are in memory, if most of them are on the disk.
    """

    action: Action
    after: tuple[Wait, ...]
    visible: int = 0
    place: Place = Place()


class Policy(ABC):
    """Base of all policies."""

    tables: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq")
    """State tables: one fp32 number an element each. ``master`` is filled from the weights."""

    executors: Mapping[Kind, Executor] = {}
    """Executors that replace or add to the engine's own."""

    @abstractmethod
    def gradient(self, microbatch: int, bucket: Bucket, step: StepShape) -> Sequence[Emission]:
        """The actions due when backward has completed a bucket's gradients of one micro-batch."""

    @abstractmethod
    def update(self, buckets: Sequence[Bucket], step: StepShape) -> Sequence[Emission]:
        """The actions due when all gradients of the step are complete.

        Args:
            buckets: those with at least one gradient.
        """
