"""Lanes execute actions: ``compute`` is the caller's thread, the others are ordered workers beside it.

A lane runs its actions one after the other in the order of submission; an action first waits for the events
it was given. On CUDA the link lanes own a stream each; the code above them is the same.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from headrace.lanes.trace import Record, Trace
from headrace.lanes.workers import Workers, start_thread
from headrace.ledger import Ledger
from headrace.schedule.action import Action

POLL = 1.0
"""Seconds between two looks at whether what is waited for will ever come."""

Work = Callable[[], int]
"""The work of one action; returns the bytes that it moved."""


class Event:
    """The end of an action: what others wait for. A failed action fails those that wait for it."""

    __slots__ = ("_done", "action", "error")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.error: BaseException | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the action has ended, well or badly."""
        return self._done.is_set()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the action as ended."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Block until the action has ended; raises the error it ended with."""
        self._done.wait()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class _Job:
    event: Event
    step: int
    work: Work
    after: tuple[Event, ...]
    ready: "torch.cuda.Event | None"  # the point on the compute stream that the work must not overtake
    booked: bool


class Lanes:
    """All lanes of one rank.

    Args:
        device: where compute happens; a CUDA device gives the link lanes a stream each.
        ledger: where seconds, bytes and stalls are booked.
        workers: threads of the ``cpu`` lane.
        paces: lane -> bytes a second to which it is held, for links that are tried and not there.

    Attributes:
        watch: called now and then while compute waits; raises when what it waits for will never come.
    """

    def __init__(
        self, device: torch.device, ledger: Ledger, workers: int, paces: Mapping[str, float] | None = None
    ) -> None:
        self.device = device
        self.paces = dict(paces or {})
        self.ledger = ledger
        self.trace = Trace()
        self.workers = Workers(workers)
        self.step = 0
        self.watch: Callable[[], None] = lambda: None
        self._booked = True
        self._lanes: dict[str, _Lane] = {}

    def submit(self, action: Action, work: Work, after: Sequence[Event] = ()) -> Event:
        """Queue ``work`` on the action's lane, to run once every event of ``after`` has ended."""
        assert action.lane != "compute", action
        event = Event(action)
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        self._lane(action.lane).submit(_Job(event, self.step, work, tuple(after), ready, self._booked))
        return event

    def wait(self, event: Event) -> None:
        """Let compute wait for an event; the time is booked as a stall on the event's lane."""
        if not event.done:
            start = time.perf_counter()
            while not event._done.wait(POLL):
                self.watch()
            if self._booked:
                self.ledger.stall(event.action.lane, time.perf_counter() - start)
        event.wait()

    @contextmanager
    def unbooked(self) -> Iterator[None]:
        """Leave what is submitted inside out of ledger and trace: they are accounts of steps of training."""
        self._booked = False
        try:
            yield
        finally:
            self._booked = True

    @contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        """Book the enclosed code of the caller's thread as ``action``."""
        start = time.perf_counter()
        yield
        self.book(action, self.step, start, 0)

    def book(self, action: Action, step: int, start: float, nbytes: int) -> None:
        """Book an action that ends now."""
        end = time.perf_counter()
        self.ledger.book(action, end - start, nbytes)
        self.trace.add(Record(step, action, start, end, nbytes))

    def inside(self) -> bool:
        """Whether the caller runs on one of these threads, which then cannot wait for their end."""
        threads = [*(lane.thread for lane in self._lanes.values()), *self.workers.threads]
        return threading.current_thread() in threads

    def close(self) -> None:
        """End all threads; actions already submitted are finished first, unless the watch gives them up."""
        for lane in self._lanes.values():
            lane.close()
        self.workers.close()

    def _lane(self, name: str) -> "_Lane":
        if name not in self._lanes:
            on_link = self.device.type == "cuda" and name in ("d2h", "h2d")
            self._lanes[name] = _Lane(name, self, torch.cuda.Stream(self.device) if on_link else None)
        return self._lanes[name]


class _Lane:
    """One ordered worker thread, with a stream of its own when it is a link of a CUDA device."""

    def __init__(self, name: str, lanes: Lanes, stream: "torch.cuda.Stream | None") -> None:
        self._lanes = lanes
        self._stream = stream
        self._pace = lanes.paces.get(name)
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = start_thread(f"headrace-{name}", self._serve)

    def submit(self, job: _Job) -> None:
        self._inbox.put(job)

    def close(self) -> None:
        self._inbox.put(None)
        while self.thread.is_alive():
            self.thread.join(POLL)
            try:
                self._lanes.watch()
            except Exception:  # whoever waits for the action has said it
                return

    def _serve(self) -> None:
        while (job := self._inbox.get()) is not None:
            try:
                for event in job.after:
                    event.wait()
                self._execute(job)
            except BaseException as error:
                job.event.finish(error)
            else:
                job.event.finish()
            del job  # the work's closure holds gradients

    def _execute(self, job: _Job) -> None:
        start = time.perf_counter()
        with self._on_stream(job):
            nbytes = job.work()
        if self._pace is not None:
            time.sleep(max(0.0, start + nbytes / self._pace - time.perf_counter()))
        if job.booked:
            self._lanes.book(job.event.action, job.step, start, nbytes)

    @contextmanager
    def _streaming(self, job: _Job) -> Iterator[None]:
        assert self._stream is not None and job.ready is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.ready)
            yield
        # Waiting here, in the lane's own thread, makes the event mean "the bytes have arrived".
        self._stream.synchronize()

    def _on_stream(self, job: _Job) -> AbstractContextManager[None]:
        return nullcontext() if self._stream is None else self._streaming(job)
