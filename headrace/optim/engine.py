"""Executes the actions that a policy emits: gradients down, norms, updates, new weights up."""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from weakref import WeakMethod

import torch
from torch import Tensor

from headrace.lanes.lanes import Event, Lanes
from headrace.memory.budget import Budget
from headrace.memory.weights import DiskWeights
from headrace.optim.collect import Collector
from headrace.optim.gradients import DiskGradients
from headrace.optim.home import leaves_staging, sent_home
from headrace.optim.kernel import CHUNK, Hyper
from headrace.optim.norm import NO_NORM, Norm, NormSums
from headrace.optim.policies.base import Emission, Executor, Policy
from headrace.optim.ranks import Ranks
from headrace.optim.states import DiskStates, Tables
from headrace.optim.store import HostStore
from headrace.optim.streaming import Streaming
from headrace.optim.waiting import Waiting
from headrace.optim.weights import WorkingWeights, changed_elements
from headrace.optim.work import EXECUTORS
from headrace.schedule.action import Action, Kind, StepShape
from headrace.schedule.layout import Bucket

IN_FLIGHT = 2
"""Buckets of gradients that may be on their way down before backward waits; bounds device memory."""


class Engine:
    """Owns the flow of one optimizer. It decides nothing: see the policy.

    Args:
        weights: the working weights, in the order of the store's layout.
        store: host buffers.
        policy: emits the actions.
        lanes: executes them.
        device: budget in which autograd's gradients are booked.
        microbatches: micro-batches of a step.
        ranks: those that share the work, of which the layout has this one's buckets; None for one alone.
    """

    def __init__(
        self,
        weights: WorkingWeights,
        store: HostStore,
        policy: Policy,
        lanes: Lanes,
        device: Budget,
        microbatches: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.weights = weights
        self.ranks = ranks
        self.store = store
        self.lanes = lanes
        self.device = device
        self.collector = Collector(store.layout)
        self.sums = NormSums(store.layout)
        self.counts = [0] * weights.count
        self.norm = NO_NORM
        self.hypers: Sequence[Hyper] = ()
        self.limit = 0.0
        self._policy = policy
        self._executors: dict[Kind, Executor] = {**EXECUTORS, **policy.executors}
        self._shape = StepShape(microbatches, len(store.layout.buckets))
        self._in_flight: deque[Event] = deque()
        self._events: dict[tuple[int, Action], Event] = {}
        self._due: list[tuple[int, Event]] = []
        self._staging_users: dict[tuple[str, int], list[Event]] = {}
        self._streaming: Streaming | None = None
        if isinstance(store.states, DiskStates):
            self._streaming = Streaming(store.states.window, len(store.states.disk.paths))
            store.states.drain = WeakMethod(self.drain)
        self._waiting: Waiting | None = None
        if isinstance(store.gradients, DiskGradients):
            self._waiting = Waiting(store.gradients.buffers, len(store.gradients.disk.paths))

    def arrive(self, parameter: int, gradient: Tensor) -> None:
        """Take a complete gradient of one micro-batch; its bucket leaves when it was the last one missing."""
        if self._streaming and self.collector.empty:
            for emission in self._streaming.ahead(len(self.store.layout.buckets), self.lanes.step):
                self._emit(emission)
        arrived, complete = self.collector.arrive(parameter, gradient)
        if not self.store.layout.places(parameter):
            return  # other ranks update all of it
        self.device.note("gradients", arrived.nbytes)
        for microbatch, index in complete:
            self._send(microbatch, index)

    def step(self, hypers: Sequence[Hyper], limit: float) -> Norm:
        """Update with what has arrived.

        Args:
            hypers: AdamW's numbers, one a param group.
            limit: gradients are scaled down to this global norm; 0 for never.

        Returns:
            The global norm and what followed from it; nothing was updated if it is not finite.
        """
        self._flush()
        if self.ranks is not None:
            self.ranks.check_same([index in self.collector.arrived for index in range(self.weights.count)])
        self.hypers, self.limit, self.norm = hypers, limit, NO_NORM
        if self.weights.off is not None:
            self.weights.off.withdraw()
        for emission in self._streamed(self._policy.update(self._active(), self._shape)):
            self._emit(emission)
            if not self.norm.finite:
                break
        self._end_step(set(self.collector.arrived) if self.norm.finite else set())
        if self.ranks is not None and self.norm.finite:
            self.ranks.share_weights(self.weights)
        self.weights.remember()
        return self.norm

    def discard(self) -> None:
        """Forget the gradients that arrived since the last step."""
        self._flush()
        self._end_step(set())
        self.sums.clear()

    def adopt_weights(self, parameters: Container[int] | None = None) -> None:
        """Fill the master weights, of all or of some parameters, from the working weights."""
        chosen = range(self.weights.count) if parameters is None else parameters
        for bucket, tables in self._visit(chosen, write=True):
            with self.weights.visited(bucket, write=False) as weights:
                for s, weight in zip(bucket.segments, weights, strict=True):
                    if s.parameter in chosen:
                        tables["master"][s.offset : s.end].copy_(weight)
        self.weights.remember()

    def adopt_changes(self, parameter: int | None = None) -> None:
        """Take what others wrote into the working weights since the last step over into the master weights.

        Elements that still are the rounded master weight keep it, with all that it holds below rounding.

        Args:
            parameter: look at this one alone.
        """
        written = set(self.weights.written(parameter))
        for bucket, tables in self._visit(written, write=True):
            for s in (s for s in bucket.segments if s.parameter in written):
                master = tables["master"][s.offset : s.end]
                weight = self.weights.flat[s.parameter][s.start : s.stop]
                for theirs, ours in zip(weight.split(CHUNK), master.split(CHUNK), strict=True):
                    changed = changed_elements(theirs, ours)
                    ours.copy_(torch.where(changed, theirs.to(ours.device, ours.dtype), ours))
        for index in written:
            self.weights.remember(index)

    def forget(self) -> None:
        """Let go of gradients that have not left, after the lanes have ended."""
        self.collector = Collector(self.store.layout)

    def publish_weights(self) -> None:
        """Round the master weights into the working weights."""
        for bucket, tables in self.store.states.visit(self.store.layout.buckets, write=False):
            with self.weights.visited(bucket, write=True) as weights:
                for s, weight in zip(bucket.segments, weights, strict=True):
                    weight.copy_(tables["master"][s.offset : s.end])
        if self.ranks is not None:
            self.ranks.share_weights(self.weights)
        self.weights.remember()

    def pieces(self, table: str, parameter: int) -> list[Tensor]:
        """A parameter's state in element order; views where states are in memory, else copies."""
        buckets, found = self.store.layout.buckets, []
        for index, s in self.store.layout.places(parameter):
            for _, tables in self.store.states.visit([buckets[index]], write=False):
                piece = tables[table][s.offset : s.end]
                found.append(piece.clone() if self._streaming else piece)
        return found if self.ranks is None else self.ranks.pieces(parameter, found)

    def fill(self, fill: Callable[[str, int, int, int, Tensor], None]) -> None:
        """Put saved values into every state: ``fill(table, parameter, start, stop, target)``."""
        for bucket, tables in self.store.states.visit(self.store.layout.buckets, write=True):
            for (table, values), s in product(tables.items(), bucket.segments):
                fill(table, s.parameter, s.start, s.stop, values[s.offset : s.end])

    def drain(self) -> None:
        """Wait for everything that was submitted, also what may end later."""
        for _, event in self._due:
            self.lanes.wait(event)
        self._due = []

    def _visit(self, parameters: Container[int], write: bool) -> Iterator[tuple[Bucket, Tables]]:
        """Every bucket with a segment of one of the parameters, with its states."""
        buckets = self.store.layout.buckets
        concerned = [bucket for bucket in buckets if any(s.parameter in parameters for s in bucket.segments)]
        return self.store.states.visit(concerned, write=write)

    def _flush(self) -> None:
        for microbatch, index in self.collector.flush():
            self._send(microbatch, index)
        while self._in_flight:
            self.lanes.wait(self._in_flight.popleft())

    def _send(self, microbatch: int, index: int) -> None:
        emissions = self._policy.gradient(microbatch, self.store.layout.buckets[index], self._shape)
        for emission in self._arriving(emissions):
            event = self._emit(emission)
            if event and emission.action.kind is Kind.DOWN:
                self._in_flight.append(event)
        while len(self._in_flight) > IN_FLIGHT:
            self.lanes.wait(self._in_flight.popleft())

    def _active(self) -> list[Bucket]:
        """Buckets with a gradient, in the order in which they are updated."""
        buckets = self.store.layout.buckets
        seen = [bucket.index for bucket in buckets if self.collector.seen(bucket.index)]
        return [buckets[index] for index in (self._streaming.ordered(seen) if self._streaming else seen)]

    def _arriving(self, emissions: Sequence[Emission]) -> Iterable[Emission]:
        return self._waiting.arriving(emissions, self.lanes.step) if self._waiting else emissions

    def _streamed(self, emissions: Sequence[Emission]) -> Iterable[Emission]:
        step = self.lanes.step
        if self.weights.off is not None:
            emissions = list(sent_home(emissions, self.store.layout, self.weights.off))
        streamed = self._streaming.around(emissions, step) if self._streaming else emissions
        return self._waiting.around(streamed, step) if self._waiting else streamed

    def _emit(self, emission: Emission) -> Event | None:
        """Submit an action to its lane, or execute it here when its lane is the caller's thread."""
        action, step = emission.action, self.lanes.step
        keys = ((step - wait.steps_back, wait.action) for wait in emission.after)
        after = [self._events[key] for key in keys if key in self._events]
        execute = self._executors[action.kind]
        if action.lane == "compute":
            for event in after:
                self.lanes.wait(event)
            with self.lanes.compute(action):
                execute(self, action, emission.place)
            return None
        if action.kind is Kind.UPDATE:
            after += self._staging_free(action)
        event = self.lanes.submit(action, partial(execute, self, action, emission.place), after)
        self._events[step, action] = event
        if leaves_staging(action) and (staging := self._staging(action)):
            self._staging_users.setdefault(staging, []).append(event)
        self._due.append((step + emission.visible, event))
        return event

    def _staging(self, action: Action) -> tuple[str, int] | None:
        assert action.unit is not None
        return self.store.staging_of(self.store.layout.buckets[action.unit.index])

    def _staging_free(self, action: Action) -> list[Event]:
        """What must have ended before the staging buffer of an update may be written again."""
        staging = self._staging(action)
        return self._staging_users.pop(staging, []) if staging else []

    def _end_step(self, updated: set[int]) -> None:
        """The step boundary: what is due becomes visible, however long it takes."""
        step = self.lanes.step
        for due, event in self._due:
            if due <= step:
                self.lanes.wait(event)
        self._due = [(due, event) for due, event in self._due if due > step]
        self._events = {key: event for key, event in self._events.items() if not event.done or key[0] >= step}
        for parameter in updated:
            self.counts[parameter] += 1
        parts, kinds = (self.store.states, self.store.gradients, self.weights.off), DiskStates | DiskGradients
        if disk := next((part.disk for part in parts if isinstance(part, kinds | DiskWeights)), None):
            disk.speeds.follow()
        if self._waiting:
            self._waiting.next_step()
        self.collector.next_step()
        self.lanes.step += 1
