"""What ran when: one record an action, in a bounded ring, for pictures and questions after the run."""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.schedule.action import Action, Kind, parse

FILE = "trace.json"
"""The file's name in a run directory."""

KEPT_STEPS = 4
"""Optimizer steps that the file holds: enough to see a rhythm, small enough to write at every checkpoint."""

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.DOWN: "gradients down",
    Kind.NORM: "norm",
    Kind.CLIP: "clip",
    Kind.UPDATE: "update",
    Kind.UP: "weights up",
    Kind.READ: "read",
    Kind.WRITE: "write",
}
"""What pictures call an action's kind."""

_LANES = ("compute", "d2h", "cpu", "h2d")


@dataclass(frozen=True, slots=True)
class Record:
    """One executed action: its optimizer step, start and end in seconds of ``time.perf_counter``, bytes."""

    step: int
    action: Action
    start: float
    end: float
    nbytes: int


class Trace:
    """The last ``capacity`` records of all lanes, in the order in which they ended."""

    def __init__(self, capacity: int = 20_000) -> None:
        self._records: deque[Record] = deque(maxlen=capacity)

    def add(self, record: Record) -> None:
        """Keep a record; callable from any lane's thread."""
        self._records.append(record)

    def records(self) -> list[Record]:
        """A copy of what is kept."""
        return list(self._records)

    def last_steps(self, count: int = KEPT_STEPS) -> list[Record]:
        """The records of the last ``count`` steps that are kept whole; of one step, if none is."""
        records = self.records()
        steps = sorted({record.step for record in records})
        if len(records) == self._records.maxlen:  # the oldest step has lost records
            steps = steps[1:] or steps
        chosen = set(steps[-count:])
        return [record for record in records if record.step in chosen]


def lane_order(records: Sequence[Record]) -> list[str]:
    """The lanes of ``records`` in the order of pictures: compute, down, update, up, then disks."""
    lanes = {record.action.lane for record in records}
    return [lane for lane in _LANES if lane in lanes] + sorted(lanes - {*_LANES})


def dump(records: Sequence[Record]) -> str:
    """Records as JSON, times in whole microseconds since the first start: about 30 bytes a record."""
    begin = min((record.start for record in records), default=0.0)
    actions = {action: index for index, action in enumerate(dict.fromkeys(r.action for r in records))}
    rows = [
        [r.step, actions[r.action], round(1e6 * (r.start - begin)), round(1e6 * (r.end - begin)), r.nbytes]
        for r in records
    ]
    return json.dumps({"actions": [str(a) for a in actions], "records": rows}, separators=(",", ":"))


def read(path: Path) -> list[Record]:
    """The records that :func:`dump` wrote, times in seconds since the first start.

    Raises UserError for a file that it did not write.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        actions = [parse(text) for text in data["actions"]]
        rows = data["records"]
        return [Record(step, actions[a], start / 1e6, end / 1e6, n) for step, a, start, end, n in rows]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{path} is damaged ({error}): delete it, the next checkpoint writes it anew"
        ) from None


def chrome_trace(records: Sequence[Record]) -> dict[str, Any]:
    """Records in Chrome's trace event format, which https://ui.perfetto.dev opens.

    The first track has the steps, each lane one more. Times are in microseconds, as the format has them.
    """
    lanes = lane_order(records)
    tracks = {lane: index for index, lane in enumerate(["steps", *lanes])}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "headrace"}}
    ]
    for lane, track in tracks.items():
        names = {"thread_name": {"name": lane}, "thread_sort_index": {"sort_index": track}}
        events += [
            {"name": name, "ph": "M", "pid": 0, "tid": track, "args": args} for name, args in names.items()
        ]
    events += [_slice(f"step {step + 1}", 0, start, end, {}) for step, start, end in step_spans(records)]
    for r in records:
        args = {"action": str(r.action), "step": r.step + 1, "bytes": r.nbytes}
        events.append(_slice(_name(r.action), tracks[r.action.lane], r.start, r.end, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_spans(records: Sequence[Record]) -> list[tuple[int, float, float]]:
    """(step counted from 0, first start, last end) of every step in ``records``, in order."""
    spans: dict[int, tuple[float, float]] = {}
    for r in records:
        start, end = spans.get(r.step, (r.start, r.end))
        spans[r.step] = min(start, r.start), max(end, r.end)
    return [(step, *spans[step]) for step in sorted(spans)]


def _slice(name: str, track: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", "pid": 0, "tid": track, **times, "args": args}


def _name(action: Action) -> str:
    text = WORDS[action.kind]
    text += "" if action.microbatch is None else f" {action.microbatch}"
    return text + ("" if action.unit is None else f" {action.unit}")
