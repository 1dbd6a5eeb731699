"""Ctrl-C: in training the first one lets the step end, the second one stops; elsewhere the first one does.

SIGTERM, which schedulers and containers send before they kill, does the same in training.
"""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of every program that it ends."""

STOPPED = "stopped"
"""What the command line says then."""

_IMPORTING = "<frozen importlib._bootstrap>"


class _Watch:
    """Whether Ctrl-C was pressed since the process is watched: an exception can get lost, this does not."""

    pressed = False


def watch() -> None:
    """Let Ctrl-C end this process with one line and code 130, whatever it is doing.

    Where modules are being imported, it ends at once: the KeyboardInterrupt could get lost in a callback, or
    leave half a module. A second Ctrl-C ends it at once, too. To be called first of all, in the main thread.
    """
    _Watch.pressed = False
    signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    if _Watch.pressed or _is_importing(frame):
        _say(f"\nheadrace: {STOPPED}\n")
        os._exit(INTERRUPTED)
    _Watch.pressed = True
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    with suppress(OSError):  # not print: the signal may have come in the middle of one
        os.write(2, text.encode())


class Interruption:
    """A context manager; ``asked`` is true after the first Ctrl-C or SIGTERM inside it.

    Outside the main thread, where Python takes no signals, it never is.

    Raises KeyboardInterrupt on entry after a Ctrl-C whose exception got lost.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: object = None
        self._terminated: object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
            self._terminated = signal.signal(signal.SIGTERM, self._note)
            if self._previous is _stop and _Watch.pressed:
                raise KeyboardInterrupt
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]
            signal.signal(signal.SIGTERM, self._terminated)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        _say(f"\n{name}: saving after this step; once more stops at once\n")
