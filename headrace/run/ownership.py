"""Whose files a run's directory holds: a run replaces what it wrote itself, and nothing else."""

import hashlib
import json
import os
from pathlib import Path

from headrace.errors import UserError
from headrace.hub import hub_name
from headrace.memory.durable import replace_text
from headrace.run.directory import RunDirectory

RECORD = ".model.json"
"""File in a run's directory: name of each file that the run put into model/ -> marks of its contents."""

_MARKED = 2**20  # bytes of a file's beginning that tell it from others


def check_out(directory: RunDirectory, model: str) -> None:
    """Refuse a directory in which the run would overwrite its model, or files that no run wrote.

    Args:
        directory: where the run will write; it need not exist.
        model: the run file's ``model.path``.

    Raises UserError naming the file and the way out.
    """
    out = directory.path.resolve()
    if out == out.parent:
        raise UserError(
            f"out={directory.path} is the root of a file system: choose a directory of the run's own"
        )
    hub, place = hub_name(model, "model"), Path(model).resolve()
    if hub is not None and place in (out, *out.parents):
        raise UserError(
            f"out={directory.path} would stand in the place of model.path={model}, which is looked for here "
            "before it is in the hub's cache: choose another out"
        )
    if hub is None and out in place.parents:
        raise UserError(
            f"model.path={model} lies in out={directory.path}, where the run writes its own files: choose an "
            "out beside it"
        )
    try:
        known = (directory.path / ".lock").exists() or directory.plan.exists()
    except OSError as error:
        raise UserError(
            f"out={directory.path} cannot be used ({error.strerror}): choose another out"
        ) from error
    if not known:
        _check_names(directory)


def check_model(directory: RunDirectory) -> None:
    """Make sure that model/ may be replaced at the end: it holds only what this run wrote, or is not there.

    Raises UserError naming the first file of another origin.
    """
    model = directory.model
    if not os.path.lexists(model):
        return
    if not model.is_dir():
        raise UserError(f"{model} is in the way of the trained model: move it, or choose another out")
    recorded = _recorded(directory)
    foreign = sorted(name for name, mark in _marks(model).items() if mark not in recorded.get(name, ()))
    if foreign:
        raise UserError(
            f"{model / foreign[0]} was not written by this run, which replaces {model} at its end: move it, "
            "or choose another out"
        )


def record_model(directory: RunDirectory, written: Path) -> None:
    """Note what is about to be put into model/, beside what stands there now, so that a kill loses neither.

    Args:
        directory: the run's.
        written: the finished directory that will be renamed to model/.

    Raises UserError where files of another origin came into model/ during the run.
    """
    check_model(directory)
    record = {name: [mark] for name, mark in _marks(written).items()}
    for name, mark in _marks(directory.model).items():
        record.setdefault(name, []).append(mark)
    replace_text(directory.path / RECORD, json.dumps(record))


def _check_names(directory: RunDirectory) -> None:
    written = (directory.metrics, directory.ledger, directory.trace, directory.data)
    there = [path for path in written if os.path.lexists(path)]
    if there:
        raise UserError(
            f"{there[0]} was not written by a run and out={directory.path} would overwrite it: choose a new "
            "directory"
        )


def _recorded(directory: RunDirectory) -> dict[str, list[str]]:
    try:
        record = json.loads((directory.path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _marks(model: Path) -> dict[str, str]:
    """Name -> size and checksum of the beginning, of every file in a directory; none where there is none."""
    return {path.name: _mark(path) for path in model.iterdir()} if model.is_dir() else {}


def _mark(path: Path) -> str:
    if not path.is_file():
        return "not a file"
    with path.open("rb") as file:
        return f"{path.stat().st_size}:{hashlib.sha256(file.read(_MARKED)).hexdigest()}"
