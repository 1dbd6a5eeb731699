"""How bytes are divided over disk paths. No torch."""

from collections.abc import Sequence
from itertools import pairwise

UNIT = 2**16
"""Elements; parts begin at multiples of it, so that they begin on whole blocks of the disk in any dtype."""


GOLDEN = (5**0.5 - 1) / 2


def split(numel: int, speeds: Sequence[float], index: int = 0) -> list[tuple[int, int]]:
    """Divide ``numel`` elements over disk paths by their speeds, in whole units: (low, high) for each.

    Args:
        numel: elements of a buffer.
        speeds: of the paths, in any unit.
        index: number of the buffer. What is left by whole units goes to other paths from buffer to buffer, so
            that all together are in proportion also where each is small.
    """
    units = -(-numel // UNIT)
    total, passed, bounds = sum(speeds), 0.0, [0]
    shift = (0.5 + index * GOLDEN) % 1
    for speed in speeds[:-1]:
        passed += speed
        bounds.append(min(units, int(units * passed / total + shift)))
    bounds.append(units)
    return [(min(numel, low * UNIT), min(numel, high * UNIT)) for low, high in pairwise(bounds)]
