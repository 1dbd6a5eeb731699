"""What differs between the plan of a checkpoint and the one asked for, and which of it may differ."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.errors import UserError

FREE = (
    "train.steps",
    "train.epochs",
    "update.bucket",
    "update.window",
    "threads.update",
    "report",
    "checkpoint",
    "memory",
    "out",
)
"""Keys, and sections with all their keys, that may change when a run goes on; its directory may be moved.

Buckets, places of states and the update's threads change no bit: sums and pieces are cut at fixed places of
each tensor.
"""

_ABSENT = object()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> ``old -> new`` for every value in which two nested mappings of plain data differ."""
    olds, news = dict(_leaves(old)), dict(_leaves(new))
    pairs = ((key, olds.get(key, _ABSENT), news.get(key, _ABSENT)) for key in {**olds, **news})
    return {key: f"{_text(before)} -> {_text(after)}" for key, before, after in pairs if before != after}


def refuse_changes(saved: Mapping[str, Any], asked: Mapping[str, Any], accept: bool) -> list[str]:
    """The changes from the saved run file to the asked one that make it another run: ``optim.lr: 1 -> 2``.

    Raises UserError naming all of them unless ``accept``.
    """
    changes = [f"{key}: {change}" for key, change in differences(saved, asked).items() if not _is_free(key)]
    if changes and not accept:
        raise UserError(
            f"this run was started with other settings ({'; '.join(changes)}): take them back, start a new "
            "run with another out, or go on all the same with checkpoint.accept_changes=true"
        )
    return changes


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "(not set)"
    return value if isinstance(value, str) else json.dumps(value)


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
