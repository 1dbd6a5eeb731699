"""Param groups: what is in them, and those of a language model, whose matrices alone decay."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Named param groups of what trains: parameters of two or more dimensions decay, others do not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parameters_of(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor, int]]:
    """(name, parameter, group) of every parameter, in the order of the groups.

    Where parameters have no names they are called by their number, ``0``, ``1``...
    """
    position = 0
    for index, group in enumerate(groups):
        names = group.get("param_names") or [str(position + i) for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            yield name, parameter, index
        position += len(group["params"])
