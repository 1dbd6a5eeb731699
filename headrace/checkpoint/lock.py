"""One run at a time in a run directory."""

import errno
import os
import socket
import warnings
from pathlib import Path
from typing import Self, TextIO

from headrace.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_TAKEN = (errno.EACCES, errno.EAGAIN)
# A process may lock a file twice, and closing it once drops both: so what this process holds is kept here.
_held: set[Path] = set()


class RunLock:
    """Context manager that holds ``run`` (created if missing) for this process.

    The lock belongs to the process: the system releases it at any end, SIGKILL too, and forked workers that
    outlive it do not hold it. The file ``.lock`` stays and names the last owner. Where the file system knows
    no locks, a warning says so and the run goes on.

    Raises UserError naming the owner when another run holds the directory, or when it cannot be made.
    """

    def __init__(self, run: Path) -> None:
        self._path = run.absolute().resolve() / ".lock"
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        if self._path in _held:
            raise self._refusal(f"this process ({os.getpid()})")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"out={self._path.parent} cannot be written to ({error.strerror}): choose another out"
            ) from error
        try:
            self._lock()
        except BaseException:
            self._file.close()
            raise
        _held.add(self._path)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()
        _held.remove(self._path)

    def _lock(self) -> None:
        assert self._file is not None
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                self._file.seek(0)
                raise self._refusal(self._file.read().strip() or "another process") from None
            warnings.warn(f"{self._path} cannot be locked ({error}): start no second run there", stacklevel=3)

    def _refusal(self, owner: str) -> UserError:
        return UserError(
            f"a run in {self._path.parent} is going on, by {owner}: wait for its end or choose another out"
        )
