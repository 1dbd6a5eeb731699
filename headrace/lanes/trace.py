"""What ran when: one record an action, in a bounded ring, for pictures and questions after the run."""

from collections import deque
from dataclasses import dataclass

from headrace.schedule.action import Action


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
