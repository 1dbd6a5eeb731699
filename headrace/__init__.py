"""Headrace trains language models larger than the memory at hand, without stalls and without surprises.

Public names are imported on first use, so that ``import headrace`` is fast.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Ledger": "headrace.ledger",
    "OffloadedAdamW": "headrace.optim.offloaded",
    "TrainerCallback": "headrace.training.callback",
    "UserError": "headrace.errors",
    "plan": "headrace.run.plan",
    "train": "headrace.run.train",
}
__all__ = ["Ledger", "OffloadedAdamW", "TrainerCallback", "UserError", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
