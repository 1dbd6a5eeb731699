"""The names in a run directory: checkpoints, those in the making or going, and those set aside.

``checkpoint-50`` is complete or damaged, never half-written: it appears and disappears by a rename.
``.checkpoint-50.saving-1234`` and ``.checkpoint-50.removing-1234`` are the work of process 1234.
``checkpoint-50.set-aside`` is kept for its owner to look at and is never read again.
"""

import os
import re
import shutil
from itertools import chain, count
from pathlib import Path
from typing import Literal

import psutil

from headrace.memory.durable import sync_directory

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9]\d*)")
_WORK = re.compile(r"\.checkpoint-\d+\.(?:saving|removing)-(\d+)")


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` stands."""
    return run / f"checkpoint-{step}"


def work_path(run: Path, step: int, work: Literal["saving", "removing"]) -> Path:
    """The hidden name under which this process writes or removes the checkpoint of ``step``."""
    return run / f".checkpoint-{step}.{work}-{os.getpid()}"


def list_checkpoints(run: Path) -> dict[int, Path]:
    """Step -> path of everything named like a checkpoint, oldest first, whether usable or not."""
    if not run.is_dir():
        return {}
    named = ((_CHECKPOINT.fullmatch(path.name), path) for path in run.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def remove(run: Path, step: int) -> None:
    """Delete the checkpoint of ``step``: renamed away first, so that a kill never leaves half of one."""
    doomed = work_path(run, step, "removing")
    checkpoint_path(run, step).rename(doomed)
    sync_directory(run)
    shutil.rmtree(doomed)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that no run reads it again; returns the new path. Nothing is deleted."""
    first = path.with_name(f"{path.name}.set-aside")
    more = (path.with_name(f"{first.name}-{number}") for number in count(2))
    aside = path.rename(next(name for name in chain([first], more) if not name.exists()))
    sync_directory(path.parent)
    return aside


def clean_leftovers(run: Path) -> list[Path]:
    """Delete what killed processes left in the making, and return it; a live process keeps its own.

    To be called before this process saves: what bears its number is from an earlier process with the same
    one, as is common in containers.
    """
    found = [(int(match[1]), path) for path in run.iterdir() if (match := _WORK.fullmatch(path.name))]
    dead = [path for pid, path in found if pid == os.getpid() or not psutil.pid_exists(pid)]
    for path in dead:
        shutil.rmtree(path)
    return dead
