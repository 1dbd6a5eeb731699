"""A saved optimizer state: checked as a whole before anything is loaded from it."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.optim.checks import HYPERS, check_groups, number
from headrace.optim.store import HostStore

MASTER = "master"
"""The state table that torch's own AdamW has not: its weights are the working weights."""


class HostStates(Mapping[int, dict[str, Tensor]]):
    """Parameter position -> its states, as under ``state`` in a torch optimizer's state_dict.

    Deliberately no dict: accelerate's ``prepare`` copies every tensor that it finds in dicts to the device
    and hands the result back, 12 bytes a parameter. Pickled or copied it is an OrderedDict, so that
    ``torch.load`` reads it without trusting anybody.
    """

    def __init__(self, states: Mapping[int, dict[str, Tensor]]) -> None:
        self._states = dict(states)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self._states[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._states!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self._states.items())


def check_saved(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless ``saved`` is an optimizer's state with param groups of the same sizes."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        held = ", ".join(map(repr, saved)) if isinstance(saved, Mapping) else repr(type(saved).__name__)
        raise UserError(
            f"the saved state must have 'state' and 'param_groups', not {held or 'nothing'}: "
            "pass what an optimizer's state_dict() gave"
        )
    theirs = saved["param_groups"]
    if not _is_groups(theirs) or not isinstance(saved["state"], Mapping):
        raise UserError("the saved state's param_groups are damaged: pass what state_dict() gave, unchanged")
    sizes = [[len(group["params"]) for group in found] for found in (groups, theirs)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the saved state has param groups of {sizes[1]} parameters, this optimizer of {sizes[0]}"
        )
    for index, group in enumerate(theirs):
        if missing := [name for name in HYPERS if name not in group]:
            raise UserError(
                f"the saved param group {index} has no {' and no '.join(missing)}: load the state of an AdamW"
            )
    check_groups(theirs)
    listed = {number for group in theirs for number in group["params"]}
    if strangers := [key for key in saved["state"] if key not in listed]:
        raise UserError(f"the saved state holds {strangers[0]!r}, which none of its param groups lists")


def entries(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The saved state of each parameter that has one, by the names of this optimizer's parameters."""
    ids = [number for group in saved["param_groups"] for number in group["params"]]
    pairs = zip(names, ids, strict=True)
    return {name: saved["state"][number] for name, number in pairs if saved["state"].get(number)}


def check_entry(name: str, entry: Mapping[str, Any], shape: tuple[int, ...], tables: Sequence[str]) -> None:
    """Raise UserError unless a parameter's saved state has its count, and every table in its shape."""
    wanted = [table for table in tables if table != MASTER or MASTER in entry]
    if missing := [key for key in ("step", *wanted) if key not in entry]:
        raise UserError(
            f"the saved state of {name} has no {' and no '.join(missing)}: load the state of an AdamW"
        )
    count = number(entry["step"])
    if not count >= 0 or count != int(count):
        raise UserError(f"the saved step of {name} is {entry['step']!r}, not a number of updates")
    for table in wanted:
        if not isinstance(entry[table], Tensor) or tuple(entry[table].shape) != shape:
            held = tuple(entry[table].shape) if isinstance(entry[table], Tensor) else entry[table]
            raise UserError(
                f"the saved {table} of {name} has shape {held}, the parameter {shape}: "
                "load the state of the same model"
            )


def fill(store: HostStore, names: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy checked entries into the state tables; without an entry, they are as in a new optimizer.

    Master weights without an entry stay what they are.
    """
    for bucket, tables in store.states.visit(store.layout.buckets, write=True):
        for (table, values), s in product(tables.items(), bucket.segments):
            entry = found.get(names[s.parameter], {})
            if table in entry:
                values[s.offset : s.end].copy_(entry[table].reshape(-1)[s.start : s.stop])
            elif table != MASTER:
                values[s.offset : s.end].zero_()


def joined(pieces: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """A whole parameter's values from its 1-D pieces in element order; a view where there is one piece."""
    flat = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces) or [torch.empty(0)])
    return flat.view(shape)


def _is_groups(groups: Any) -> bool:
    if not isinstance(groups, Sequence):
        return False
    return all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
