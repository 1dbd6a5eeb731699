"""Param groups of a language model: matrices decay, norms and biases do not."""

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Named param groups of what trains: parameters of two or more dimensions decay, others do not."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
