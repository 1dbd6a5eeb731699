"""How fast a disk writes and reads, in a second or two: big blocks, past the system's caches where it can."""

import mmap
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.memory import blocks
from headrace.memory.blocks import BLOCK

MOST_BYTES = 256 * 2**20
"""What a measurement writes at most."""

_MOST_SECONDS = 2.0  # of writing: a slow disk is known by then
_SPARED = 4  # part of the free space that is not taken


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
        count = min(most_bytes, shutil.disk_usage(directory).free // _SPARED) // BLOCK
        if not count:
            return None
        descriptor, direct = blocks.open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
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


def _measure(descriptor: int, direct: bool, count: int) -> DiskSpeed:
    with mmap.mmap(-1, BLOCK) as region:  # aligned to a page, as O_DIRECT wants it
        region[:] = os.urandom(2**16) * (BLOCK // 2**16)  # some disks shorten zeros
        with memoryview(region) as block:
            begin, written = time.perf_counter(), 0
            while not written or (written < count * BLOCK and time.perf_counter() - begin < _MOST_SECONDS):
                written += _whole(blocks.write_at(descriptor, block, written))
            os.fsync(descriptor)
            write = written / (time.perf_counter() - begin)
            if not direct and sys.platform == "linux":
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            begin = time.perf_counter()
            for offset in range(0, written, BLOCK):
                _whole(blocks.read_at(descriptor, block, offset))
            return DiskSpeed(direct, write, written / (time.perf_counter() - begin))


def _whole(done: int) -> int:
    if done != BLOCK:
        raise OSError(f"{done} of {BLOCK} bytes went through: the disk is full")
    return done


def turn_speed(path: Path) -> float:
    """Bytes a second at which a path reads and writes in turn: every byte is read once and written once."""
    found = measure(path)
    return 1 / (1 / found.read + 1 / found.write) if found else 1.0
