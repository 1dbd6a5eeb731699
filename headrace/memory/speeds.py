"""How fast disk paths are while a run goes on, and what share of a buffer each should take. No torch."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from headrace.memory.blocks import BLOCK

WEIGHT = 0.2
"""Of a new measurement in the running mean."""

CHANGED = 1.25
"""Shares follow once a path's part of the whole speed has changed by this factor."""

SLOW = 4.0
"""A path that became slower by this factor is named."""


class PathSpeeds:
    """Running means of what paths move a second.

    Every byte is read once and written once a step, so a path's speed is that of both in turn.

    Args:
        paths: named in warnings.
        start: bytes a second of each, in any unit, as measured at the start.
    """

    def __init__(self, paths: Sequence[Path], start: Sequence[float]) -> None:
        self.shares = [speed / sum(start) for speed in start]
        self._paths = list(paths)
        self._seconds: list[dict[str, float]] = [{} for _ in paths]  # direction -> seconds a byte
        self._best: list[float | None] = [None for _ in paths]
        self._named: set[int] = set()

    def note(self, path: int, direction: str, nbytes: int, seconds: float) -> None:
        """Take the time of a transfer into account; small ones say little."""
        if nbytes < BLOCK:
            return
        means, new = self._seconds[path], seconds / nbytes
        means[direction] = new if direction not in means else (1 - WEIGHT) * means[direction] + WEIGHT * new

    def follow(self) -> None:
        """Set the shares by what was measured, if that has changed much; name paths that became slow."""
        if not all(len(means) == 2 for means in self._seconds):
            return
        speeds = [1 / sum(means.values()) for means in self._seconds]
        for path, speed in enumerate(speeds):
            best = max(speed, self._best[path] or 0.0)
            self._best[path] = best
            if speed * SLOW < best and path not in self._named:
                self._named.add(path)
                warnings.warn(
                    f"{self._paths[path]} moves {speed / 1e6:.0f} MB a second, where it moved "
                    f"{best / 1e6:.0f} before: the run waits for it",
                    stacklevel=2,
                )
        shares = [speed / sum(speeds) for speed in speeds]
        ratios = [max(a / b, b / a) for a, b in zip(shares, self.shares, strict=True)]
        if max(ratios) > CHANGED:
            self.shares = shares
