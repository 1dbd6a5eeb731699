"""One run at a time in a directory, and one rank at a time on a path."""

import errno
import os
import socket
import threading
import warnings
from contextlib import suppress
from os.path import samestat
from pathlib import Path
from typing import Self, TextIO

from headrace.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

RANKS = (".headrace-", "headrace-r")
"""How the names of files begin that ranks have in a directory which they share."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
# A process may lock a file twice, and closing it once drops both: so what this process holds is kept here.
_held: set[Path] = set()


class Turn:
    """Context manager of one thread at a time, and with a path of one process at a time.

    The system gives the turn to another one when a process dies. Where it knows no such locks, processes do
    not wait for each other: turns are for speed alone.

    Args:
        path: a file that all processes open; None for threads alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._thread = threading.Lock()
        self._file: int | None = None

    def __enter__(self) -> Self:
        self._thread.acquire()
        if self._path is not None and fcntl is not None:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        """Let go of the file, and remove it: whoever still has it open goes on with it."""
        if self._file is not None and self._path is not None:
            os.close(self._file)
            self._path.unlink(missing_ok=True)
            self._file = None


class DirectoryLock:
    """Context manager that holds a directory (created if missing) for this process.

    The lock belongs to the process: the system releases it at any end, SIGKILL too, and forked workers that
    outlive it do not hold it. The lock's file stays and names the last owner; a run that left nothing
    else takes it away again, with the directories made for it; files of other ranks do not count. Where the
    file system knows no locks, a warning says so and the run goes on.

    Args:
        directory: what is held.
        name: of the lock's file in it.
        key: what the user set to the directory, named in messages.

    Raises UserError naming the owner when another run holds the directory, or when it cannot be made.
    """

    def __init__(self, directory: Path, name: str = ".lock", key: str = "out") -> None:
        self._path = directory.absolute().resolve() / name
        self._key = key
        self._file: TextIO | None = None
        self._made: list[Path] = []

    def __enter__(self) -> Self:
        if self._path in _held:
            raise self._refusal(f"this process ({os.getpid()})")
        self._made = [path for path in (self._path, *self._path.parents) if not path.exists()]
        while not self._is_current():  # another run may have taken its own away meanwhile
            self._open()
            try:
                self._lock()
            except BaseException:
                self._close()
                raise
        assert self._file is not None
        _held.add(self._path)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            others = (file for file in self._path.parent.iterdir() if file != self._path)
            if self._path in self._made and all(file.name.startswith(RANKS) for file in others):
                for path in self._made:
                    path.unlink() if path == self._path else path.rmdir()
        self._close()
        _held.remove(self._path)

    def _open(self) -> None:
        self._close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115, __exit__ closes it
        except OSError as error:
            raise UserError(
                f"{self._key}={self._path.parent} cannot be written to ({error.strerror}): choose another "
                f"{self._key}"
            ) from error

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_current(self) -> bool:
        """Whether the file that is open is the one that stands under the name."""
        try:
            return self._file is not None and samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

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
            f"a run in {self._path.parent} is going on, by {owner}: wait for its end or choose another "
            f"{self._key}"
        )
