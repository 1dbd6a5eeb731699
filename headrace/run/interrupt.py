"""Ctrl-C: the first one lets the step end, the second one stops at once."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self


class Interruption:
    """A context manager; ``asked`` is true after the first Ctrl-C inside it.

    Outside the main thread, where Python takes no signals, it never is.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, b"\nCtrl-C: saving after this step; once more stops at once\n")
