"""The account of a run: bytes moved, seconds busy, seconds stalled, peak bytes. Predicted and measured alike.

A plan predicts a Ledger and a run measures one, so showing a run is a comparison (:func:`compare`).
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.schedule.action import Action, parse

PURPOSES = ("weights", "gradients", "states", "activations", "logits", "buffers", "other")
"""What bytes are for, in the order in which tables show them."""

TIERS = ("device", "ram", "host", "disk")
"""Memory tiers in the order of tables; ``ram`` is device and host where there is no accelerator."""

NOTICEABLE = 0.10
"""Predicted and measured figures further apart than this share are named at the end of a run."""


@dataclass
class Account:
    """Work of one action over a whole run: seconds busy, bytes moved, times executed."""

    seconds: float = 0.0
    nbytes: int = 0
    count: int = 0

    def add(self, seconds: float, nbytes: int) -> None:
        """Add one execution."""
        self.seconds += seconds
        self.nbytes += nbytes
        self.count += 1


@dataclass
class Ledger:
    """Bytes and seconds by action, stalls by lane, peak bytes by tier and purpose.

    Attributes:
        steps: optimizer steps the account covers.
        actions: per action, its seconds, bytes and count over all steps.
        stalls: lane -> seconds in which the compute lane waited for it.
        peaks: tier -> purpose -> highest bytes held at one time.
        tier_peaks: tier -> highest sum over the purposes at one time (at most the sum of ``peaks``).
        process_peak: highest resident bytes of the process, 0 when unknown.
        seconds: wall-clock seconds of the steps, 0 in a prediction without time.
    """

    steps: int = 0
    actions: dict[Action, Account] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    tier_peaks: dict[str, int] = field(default_factory=dict)
    process_peak: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def book(self, action: Action, seconds: float, nbytes: int) -> None:
        """Book one execution of ``action``; callable from any lane's thread."""
        with self._lock:
            self.actions.setdefault(action, Account()).add(seconds, nbytes)

    def stall(self, lane: str, seconds: float) -> None:
        """Book seconds in which compute waited for ``lane``."""
        with self._lock:
            self.stalls[lane] = self.stalls.get(lane, 0.0) + seconds

    def hold(self, tier: str, purpose: str, nbytes: int) -> None:
        """Raise the peak of ``purpose`` on ``tier`` to ``nbytes`` if it is higher than any before."""
        assert purpose in PURPOSES, purpose
        with self._lock:
            held = self.peaks.setdefault(tier, {})
            held[purpose] = max(held.get(purpose, 0), nbytes)

    def hold_total(self, tier: str, nbytes: int) -> None:
        """Raise the peak of the whole ``tier`` to ``nbytes`` if it is higher than any before."""
        with self._lock:
            self.tier_peaks[tier] = max(self.tier_peaks.get(tier, 0), nbytes)

    def lane_seconds(self, lane: str) -> float:
        """Seconds in which ``lane`` was busy."""
        return sum(account.seconds for action, account in self.actions.items() if action.lane == lane)

    def lane_bytes(self, lane: str) -> int:
        """Bytes that ``lane`` moved."""
        return sum(account.nbytes for action, account in self.actions.items() if action.lane == lane)

    @property
    def lanes(self) -> list[str]:
        """Every lane with at least one action, sorted."""
        return sorted({action.lane for action in self.actions})

    def total(self, tier: str) -> int:
        """Peak bytes of ``tier``: measured as one sum, or the sum of its purposes in a prediction."""
        return self.tier_peaks.get(tier) or sum(self.peaks.get(tier, {}).values())

    def __str__(self) -> str:
        """Peak bytes by tier and purpose; then bytes, busy and waited-for seconds of each lane."""
        lines = [f"{self.steps} steps, {self.seconds:.1f} s"]
        for tier in (tier for tier in TIERS if tier in self.peaks):
            lines.append(f"{tier} peak {self.total(tier):,} bytes")
            lines += [f"  {purpose:12} {self.peaks[tier][purpose]:>18,}" for purpose in self._held(tier)]
        lines.append(f"{'lane':10} {'bytes moved':>18} {'busy s':>9} {'waited for s':>13}")
        for lane in self.lanes:
            busy, waited = self.lane_seconds(lane), self.stalls.get(lane, 0.0)
            lines.append(f"  {lane:8} {self.lane_bytes(lane):>18,} {busy:>9.2f} {waited:>13.2f}")
        return "\n".join(lines)

    def _held(self, tier: str) -> list[str]:
        return [purpose for purpose in PURPOSES if purpose in self.peaks[tier]]

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        actions = {str(a): [c.seconds, c.nbytes, c.count] for a, c in self.actions.items()}
        return {
            "steps": self.steps,
            "actions": actions,
            "stalls": dict(self.stalls),
            "peaks": {tier: dict(held) for tier, held in self.peaks.items()},
            "tier_peaks": dict(self.tier_peaks),
            "process_peak": self.process_peak,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Ledger":
        """The inverse of ``to_json``."""
        actions = {parse(text): Account(*account) for text, account in data["actions"].items()}
        return cls(**{**data, "actions": actions})


@dataclass(frozen=True)
class Comparison:
    """One line of a comparison: a figure's name, its predicted and measured value, and the unit of both."""

    name: str
    predicted: float
    measured: float
    unit: str  # "bytes" or "seconds"

    @property
    def difference(self) -> float:
        """Measured over predicted, minus one; 0 when both are equal, infinite when 0 was predicted."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted else float("inf")

    @property
    def noticeable(self) -> bool:
        """Whether the two are more than :data:`NOTICEABLE` apart."""
        return abs(self.difference) > NOTICEABLE


def compare(predicted: Ledger, measured: Ledger) -> list[Comparison]:
    """Lay a measured ledger beside the predicted one: tiers and purposes, process, bytes a step by link."""
    return [*_compare_memory(predicted, measured), *_compare_links(predicted, measured)]


def _compare_memory(predicted: Ledger, measured: Ledger) -> Iterator[Comparison]:
    for tier in (tier for tier in TIERS if tier in predicted.peaks or tier in measured.peaks):
        held, found = predicted.peaks.get(tier, {}), measured.peaks.get(tier, {})
        yield Comparison(f"{tier} peak", predicted.total(tier), measured.total(tier), "bytes")
        for purpose in PURPOSES:
            # What the process holds besides ("other") has no measurement of its own, only the tier's peak.
            if purpose in found or (purpose in held and purpose != "other"):
                yield Comparison(f"{tier} {purpose}", held.get(purpose, 0), found.get(purpose, 0), "bytes")
    if predicted.process_peak and measured.process_peak and "ram" not in predicted.peaks:
        yield Comparison("process peak", predicted.process_peak, measured.process_peak, "bytes")


def _compare_links(predicted: Ledger, measured: Ledger) -> Iterator[Comparison]:
    for lane in sorted({*predicted.lanes, *measured.lanes}):
        a, b = (ledger.lane_bytes(lane) / max(1, ledger.steps) for ledger in (predicted, measured))
        if a or b:
            yield Comparison(f"{lane} a step", a, b, "bytes")
