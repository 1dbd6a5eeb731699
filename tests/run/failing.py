"""The command line in a process whose disk fails at a chosen operation."""

import errno
import os
import shutil
import time
from itertools import count
from pathlib import Path

import cli_process

FAULTS = ["ENOSPC", "EIO on write", "EIO on read", "short read", "changed byte", "path removed", "hang"]


def run(run_file, fault, moment, output):
    """`headrace train RUN` in which the operation number ``moment`` on a disk path fails."""
    import headrace.memory.blocks as blocks
    from headrace.memory.disk import DiskStore

    if fault in ("ENOSPC", "EIO on write"):
        code = errno.ENOSPC if fault == "ENOSPC" else errno.EIO
        blocks.write_at = _fails_at(moment, blocks.write_at, lambda *_: _raise(code))
    elif fault == "EIO on read":
        blocks.read_at = _fails_at(moment, blocks.read_at, lambda *_: _raise(errno.EIO))
    elif fault == "hang":
        blocks.Watch.__init__.__defaults__ = (3.0,)
        blocks.read_at = _fails_at(moment, blocks.read_at, lambda *_: time.sleep(300))
    else:
        damage = {"short read": _shorten, "changed byte": _change, "path removed": _remove}[fault]
        DiskStore.reading = _damaged_at(moment, DiskStore.reading, damage)
    cli_process.run(["train", str(run_file)], output)


def slow(run_file, output, seconds):
    """`headrace train RUN` whose path ``slow`` takes so many seconds longer for every block."""
    import headrace.memory.blocks as blocks

    for verb in ("read", "write"):
        original = getattr(blocks.BlockFile, verb)

        def slower(self, *arguments, original=original):
            if "slow" in self.path.parts:
                time.sleep(seconds)
            return original(self, *arguments)

        setattr(blocks.BlockFile, verb, slower)
    cli_process.run(["train", str(run_file)], output)


def _raise(code):
    raise OSError(code, os.strerror(code))


def _fails_at(moment, original, fault):
    number = count()

    def operation(*arguments):
        if next(number) == moment:
            fault(*arguments)
        return original(*arguments)

    return operation


def _damaged_at(moment, original, damage):
    number = count()

    def reading(self, name, index, tables):
        if (name, index) in self._parts and next(number) == moment:
            damage(self._file(name, index))
        return original(self, name, index, tables)

    return reading


def _shorten(file: Path):
    os.truncate(file, file.stat().st_size - 8192)


def _change(file: Path):
    with file.open("r+b") as opened:
        opened.seek(-5000, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


def _remove(file: Path):
    shutil.rmtree(file.parent)
