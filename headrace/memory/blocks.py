"""A file read and written in large aligned blocks, past the system's caches where the file system allows it.

Every block has a checksum (XXH3, 64 bits). ``O_DIRECT`` wants addresses, offsets and lengths to be multiples
of the disk's block: 4 KiB does for all common ones.
"""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.errors import RunStopped, reason
from headrace.memory.durable import DISK_FULL

ALIGN = 4096
"""Addresses, offsets and lengths are multiples of this many bytes."""

BLOCK = 4 * 2**20
"""Bytes of one read or write: large enough that calls do not count."""

PATIENCE = 120.0
"""Seconds after which one block's read or write counts as hung."""

GO_ON = "go on from the last checkpoint"
"""The end of every sentence about a disk that failed."""

_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks of the disk."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Block:
    """Memory and its place in a file."""

    memory: memoryview
    offset: int


def cut(memory: memoryview, offset: int) -> list[Block]:
    """The blocks of one piece of memory that lies at ``offset`` in a file."""
    starts = range(0, memory.nbytes, BLOCK)
    return [Block(memory[start : start + BLOCK], offset + start) for start in starts]


class Watch:
    """Knows every read and write under way, so that one that never ends is found.

    Args:
        patience: seconds that one block may take.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._under_way: dict[int, tuple[float, str, int, Path]] = {}

    @contextmanager
    def operation(self, verb: str, nbytes: int, path: Path) -> Iterator[None]:
        """Enclose one read or write of this thread."""
        thread = threading.get_ident()
        self._under_way[thread] = time.monotonic(), verb, nbytes, path
        try:
            yield
        finally:
            del self._under_way[thread]

    @property
    def hangs(self) -> bool:
        """Whether an operation has been under way for too long."""
        now = time.monotonic()
        return any(now - start > self.patience for start, *_ in list(self._under_way.values()))

    def check(self) -> None:
        """Raise RunStopped naming the operation that has been under way for too long, if there is one."""
        under_way = list(self._under_way.values())
        for start, verb, nbytes, path in under_way:
            if time.monotonic() - start > self.patience:
                raise RunStopped(
                    f"{verb} {nbytes:,} bytes of {path} has not ended in {self.patience:.0f} s, with "
                    f"{len(under_way)} reads and writes under way: the disk hangs; look at it, then {GO_ON}"
                )


class BlockFile:
    """An open file of blocks; a context manager.

    Attributes:
        path: where it lies.
        direct: whether the system's caches are passed by.

    Args:
        writing: open for writing, creating it; else for reading.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, watch: Watch, *, writing: bool) -> None:
        self.path = path
        self._watch = watch
        flags = os.O_RDWR | os.O_CREAT if writing else os.O_RDONLY
        self._descriptor, self.direct = open_direct(path, flags)

    def __enter__(self) -> "BlockFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def resize(self, nbytes: int) -> None:
        """Give the file this length, with its space on the disk where the system can promise that."""
        if os.fstat(self._descriptor).st_size != nbytes:
            os.ftruncate(self._descriptor, nbytes)
            allocate(self._descriptor, nbytes)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        with self._watch.operation("syncing", 0, self.path):
            os.fsync(self._descriptor)

    def write(self, block: Block) -> int:
        """Write a block and return its checksum.

        Raises:
            RunStopped: the disk is full, or fails.
        """
        checksum = xxhash.xxh3_64_intdigest(block.memory)
        rest, offset = block.memory, block.offset
        while rest:
            try:
                with self._watch.operation("writing", rest.nbytes, self.path):
                    count = write_at(self._descriptor, rest, offset)
            except OSError as error:
                raise self._failed("written", rest.nbytes, offset, error) from error
            rest, offset = rest[count:], offset + count
        return checksum

    def read(self, block: Block, checksum: int) -> None:
        """Fill a block's memory, and compare it with its checksum.

        Raises:
            RunStopped: the file is too short or other bytes than were written, or the disk fails.
        """
        rest, offset = block.memory, block.offset
        while rest:
            try:
                with self._watch.operation("reading", rest.nbytes, self.path):
                    count = read_at(self._descriptor, rest, offset)
            except OSError as error:
                raise self._failed("read", rest.nbytes, offset, error) from error
            if count % ALIGN or count == 0:
                raise RunStopped(
                    f"{self.path} ends at byte {offset + count:,}, inside of what was written: something "
                    f"shortened it; {GO_ON}"
                )
            rest, offset = rest[count:], offset + count
        if xxhash.xxh3_64_intdigest(block.memory) != checksum:
            raise RunStopped(
                f"{self.path} has other bytes at {block.offset:,} than were written there: the disk, or "
                f"another program, changed them; {GO_ON}"
            )

    def _failed(self, verb: str, nbytes: int, offset: int, error: OSError) -> RunStopped:
        fix = "make room" if error.errno in DISK_FULL else "look at the disk"
        return RunStopped(
            f"{nbytes:,} bytes at {offset:,} of {self.path} cannot be {verb} ({reason(error)}): {fix}, "
            f"then {GO_ON}"
        )


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """A descriptor, and whether it passes the system's caches by."""
    flags |= getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags | _DIRECT, 0o666), bool(_DIRECT)
    except OSError as error:
        if not _DIRECT or error.errno not in _REFUSED:
            raise
    # The refusal may have made the file: tmpfs before Linux 6.6 does.
    return os.open(path, flags & ~os.O_EXCL, 0o666), False


def allocate(descriptor: int, nbytes: int) -> bool:
    """Claim the space of a file's first bytes; false where the system cannot promise it.

    Raises:
        OSError: there is no room.
    """
    if not hasattr(os, "posix_fallocate") or nbytes == 0:
        return False
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (*_REFUSED, errno.ENOSYS):
            raise
        return False
    return True


def write_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Write at an offset; returns how many bytes went through."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, [memory], offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, memory)


def read_at(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read at an offset into memory; returns how many bytes came, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        content = os.read(descriptor, memory.nbytes)
    memory[: len(content)] = content
    return len(content)


_SEEKING = threading.Lock()
"""Where a read or write cannot name its offset, they go one after the other."""
