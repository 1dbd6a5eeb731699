"""How fast a disk writes and reads, in a second or two: big blocks, past the system's caches where it can."""

import mmap
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.memory import blocks

MOST_BYTES = 256 * 2**20
"""What a measurement writes at most."""

_BLOCK = 4 * 2**20  # bytes a call: large enough that calls do not count
_MOST_SECONDS = 2.0  # of writing: a slow disk is known by then
_SPARED = 4  # part of the free space that is not taken
_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class DiskSpeed:
    """One measurement of one directory.

    Attributes:
        direct: whether the system's caches could be passed by (``O_DIRECT``); else reading may be too fast.
        write: bytes a second, the last one on the disk.
        read: bytes a second.
    """

    direct: bool
    write: float
    read: float


def measure(directory: Path, most_bytes: int = MOST_BYTES) -> DiskSpeed | None:
    """Write a file and read it back. It is removed before anything is in it, where the system allows that.

    Returns None where there is hardly any room, or the directory cannot be written to.
    """
    path = directory / f".headrace-disk-speed-{os.getpid()}"
    try:
        count = min(most_bytes, shutil.disk_usage(directory).free // _SPARED) // _BLOCK
        if not count:
            return None
        descriptor, direct = _open(path)
    except OSError:
        return None
    try:
        if os.name == "posix":
            path.unlink()  # a kill leaves nothing
        return _measure(descriptor, direct, count)
    except OSError:
        return None
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o600), True
        except OSError:  # such as tmpfs before Linux 6.6
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600), False


def _measure(descriptor: int, direct: bool, count: int) -> DiskSpeed:
    with mmap.mmap(-1, _BLOCK) as region:  # aligned to a page, as O_DIRECT wants it
        region[:] = os.urandom(2**16) * (_BLOCK // 2**16)  # some disks shorten zeros
        with memoryview(region) as block:
            begin, written = time.perf_counter(), 0
            while not written or (written < count * _BLOCK and time.perf_counter() - begin < _MOST_SECONDS):
                written += _whole(blocks.write_at(descriptor, block, written))
            os.fsync(descriptor)
            write = written / (time.perf_counter() - begin)
            if not direct and sys.platform == "linux":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            for offset in range(0, written, _BLOCK):
                _whole(blocks.read_at(descriptor, block, offset))
            return DiskSpeed(direct, write, written / (time.perf_counter() - begin))


def _whole(done: int) -> int:
    if done != _BLOCK:
        raise OSError(f"{done} of {_BLOCK} bytes went through: the disk is full")
    return done
