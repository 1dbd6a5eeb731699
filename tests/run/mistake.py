"""A mistake that people make, and what must stand in the answer."""

from collections.abc import Callable
from dataclasses import dataclass

from desk import Desk


@dataclass(frozen=True)
class Mistake:
    """One mistake, as its maker would tell it, and what the answer must hold.

    Attributes:
        what: what was wrong.
        value: the wrong value, or what is missing.
        place: key, file or line.
        fix: what to do.
        make: makes the mistake; returns the command's arguments.
        real: whether it is tried in a process of its own.
    """

    what: str
    value: str
    place: str
    fix: str
    make: Callable[[Desk], list]
    real: bool = False
