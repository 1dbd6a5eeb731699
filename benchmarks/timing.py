"""Times pieces of work side by side: one after the other in every round, so that noise hits all alike."""

import time
from collections.abc import Callable, Mapping
from statistics import median


def interleave(
    work: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every piece of work in every round; the warm-up rounds are not among them."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(warmup + rounds):
        for name, execute in work.items():
            start = time.perf_counter()
            execute()
            if number >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(over: list[float], under: list[float]) -> float:
    """The median over the rounds of one piece's time to another's in the same round."""
    return median(a / b for a, b in zip(over, under, strict=True))
