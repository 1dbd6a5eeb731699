"""Whether a step fits a machine's budgets and, where it does not, the knobs that make it fit.

A knob is proposed only after the ledger was predicted again with it turned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile

from headrace.config import format_size
from headrace.ledger import Ledger
from headrace.machine.machine import Machine
from headrace.planner.memory import predict
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload, divisors

MIB = 2**20
GIB = 2**30

KNOBS = {"device": "memory.device", "host": "memory.host", "ram": "memory.host", "disk": "memory.disk"}
"""Tier -> the run file's key of its budget."""

NAMES = {"device": "device", "host": "host", "ram": "RAM", "disk": "disk"}
"""Tier -> what tables and sentences call it."""

SMALL_CHUNK = 128
"""Tokens of a chunk of logits where memory is short: matrix products this high still keep a core busy."""

SMALL_BUCKET = 2**20
"""Elements of a bucket where memory is short: 2 MiB of bf16."""

DISK = "runs/disk"
"""The directory that is proposed where a run file names none."""

COARSE = 32 * GIB
"""Budgets above this are proposed in whole GiB, others in steps of 64 MiB."""

SHORTEST = 128
"""Tokens of the shortest context that is proposed."""


@dataclass(frozen=True)
class Fix:
    """Settings that make it fit.

    Attributes:
        settings: as written on the command line, ``section.key=value``.
        work: the workload with them.
        budgets: tier -> bytes with them.
        ledger: predicted anew.
    """

    settings: tuple[str, ...]
    work: Workload
    budgets: Mapping[str, int]
    ledger: Ledger


@dataclass(frozen=True)
class Verdict:
    """Whether it fits.

    Attributes:
        ledger: as predicted.
        budgets: tier -> bytes allowed.
        machine: what it was predicted for.
        fixes: what would make it fit, the least change first; empty where it fits, or where nothing does.
    """

    ledger: Ledger
    budgets: Mapping[str, int]
    machine: Machine
    fixes: tuple[Fix, ...] = ()

    @property
    def short(self) -> dict[str, int]:
        """Tier -> bytes that its budget lacks; empty where it fits."""
        return lacking(self.ledger, self.budgets)

    @property
    def fits(self) -> bool:
        """Whether every tier stays within its budget."""
        return not self.short

    @property
    def sentence(self) -> str:
        """``FITS.``, or what is missing where, and the least change that helps."""
        if self.fits:
            return "FITS."
        missing = [
            f"{NAMES[tier]} needs {_gib(self.ledger.total(tier))}, {_gib(lack)} more than the "
            f"{_gib(self.budgets[tier])} of {KNOBS[tier]}"
            for tier, lack in self.short.items()
        ]
        advice = "no setting makes it fit; choose a smaller model"
        if self.short.keys() == {"disk"}:
            advice = "give memory.disk more room, or further paths"
        if self.fixes:
            advice = f"set {' '.join(self.fixes[0].settings)}"
        return f"DOES NOT FIT: {'; '.join(missing)}: {advice}"

    def __str__(self) -> str:
        """The sentence and, line by line, the other changes that would help."""
        return "\n".join([self.sentence, *(f"  or {' '.join(fix.settings)}" for fix in self.fixes[1:])])


def judge(
    shape: ModelShape, work: Workload, machine: Machine, budgets: Mapping[str, int] | None = None
) -> Verdict:
    """Predict the step and look for fixes if it exceeds a budget.

    Args:
        machine: what there is.
        budgets: tier -> bytes that may be used of it; a tier that is left out may be used whole.
    """
    allowed = {**machine.tiers, **(budgets or {})}
    verdict = Verdict(predict(shape, work, machine), allowed, machine)
    return verdict if verdict.fits else replace(verdict, fixes=tuple(_fixes(shape, verdict, work)))


def lacking(ledger: Ledger, budgets: Mapping[str, int]) -> dict[str, int]:
    """Tier -> bytes that its budget lacks, for the tiers that exceed it."""
    needs = {tier: ledger.total(tier) - allowed for tier, allowed in budgets.items()}
    return {tier: lack for tier, lack in needs.items() if lack > 0}


def _fixes(shape: ModelShape, verdict: Verdict, work: Workload) -> Iterator[Fix]:
    """Single changes that suffice; where none does, the least that does of all changes together."""
    if raised := _raised_budgets(verdict):
        settings = (f"{KNOBS[tier]}={format_size(raised[tier])}" for tier in verdict.short)
        yield Fix(tuple(settings), work, raised, verdict.ledger)
    trial = _Trial(shape, verdict, work)
    changes = _changes(work, verdict.machine)
    single = [fix for kind in changes if (fix := next(filter(None, map(trial.fix, kind)), None))]
    yield from single
    if not single and (fix := trial.together([change for kind in changes for change in kind])):
        yield fix


def _raised_budgets(verdict: Verdict) -> dict[str, int] | None:
    """Budgets raised to what is needed, in round numbers, if the machine has as much."""
    raised = dict(verdict.budgets)
    for tier in verdict.short:
        need, capacity = verdict.ledger.total(tier), verdict.machine.tiers.get(tier, 0)
        units = (GIB, 64 * MIB, 1) if need > COARSE else (64 * MIB, 1)
        rounded = (-(-need // unit) * unit for unit in units)
        enough = next((size for size in rounded if size <= capacity), None)
        if enough is None:
            return None
        raised[tier] = enough
    return raised


@dataclass(frozen=True)
class _Change:
    settings: tuple[str, ...]
    turn: Callable[[Workload], Workload]


def _changes(work: Workload, machine: Machine) -> list[list[_Change]]:
    """Changes by kind, the least harm first; within a kind ever stronger ones, of which the last counts."""
    rows = [n for n in reversed(divisors(work.rows)) if n < work.micro_batch]
    halves = takewhile(lambda context: context >= SHORTEST, (work.context >> n for n in count(1)))
    return [
        _values("train.loss_chunk", [SMALL_CHUNK] if work.loss_chunk > SMALL_CHUNK else [], "loss_chunk"),
        _values("update.bucket", [SMALL_BUCKET] if work.bucket > SMALL_BUCKET else [], "bucket"),
        [_Change((f"train.micro_batch={n}",), partial(Workload.with_micro_batch, rows=n)) for n in rows],
        _values("memory.activations", ["recompute"] if work.activations == "keep" else [], "activations"),
        *_moves(work, machine),
        _values("model.dtype", ["bf16"] if work.dtype == "fp32" else [], "dtype"),
        _values("data.context", halves, "context"),
    ]


def _moves(work: Workload, machine: Machine) -> list[list[_Change]]:
    """Other tiers for what can live there: states first, of which there is most."""
    states = [_move(work, "states", "disk")] if work.states == "host" else []
    tiers = ["disk"] if machine.unified else ["host", "disk"]
    gradients = [_move(work, "gradients", "disk")] if work.gradients == "host" else []
    weights = [_move(work, "weights", tier) for tier in tiers] if work.weights == "device" else []
    inputs = [_move(work, "activations", "disk")] if work.activations == "recompute" else []
    return [states, gradients, weights, inputs]


def _move(work: Workload, name: str, tier: str) -> _Change:
    settings = {
        f"memory.{name}={tier}": True,
        f"memory.disk=[{{path: {DISK}}}]": tier == "disk" and not work.paths,
    }
    # Layers whose weights leave are recomputed.
    settings["memory.activations=recompute"] = name == "weights" and work.activations == "keep"
    return _Change(
        tuple(setting for setting, holds in settings.items() if holds), partial(_moved, name, tier)
    )


def _moved(name: str, tier: str, work: Workload) -> Workload:
    if name == "weights" and work.activations == "keep":
        work = replace(work, activations="recompute")
    paths = work.paths or (1.0,) if tier == "disk" else work.paths
    return replace(_with(work, name, tier), paths=paths)


def _values(key: str, values: Iterable[int | str], name: str) -> list[_Change]:
    return [_Change((f"{key}={value}",), partial(_with, name=name, value=value)) for value in values]


def _with(work: Workload, name: str, value: int | str) -> Workload:
    return replace(work, **{name: value})  # type: ignore[arg-type]


class _Trial:
    """Predicts with changes made."""

    def __init__(self, shape: ModelShape, verdict: Verdict, work: Workload) -> None:
        self._shape = shape
        self._verdict = verdict
        self._work = work

    def fix(self, *changes: _Change) -> Fix | None:
        """These changes as a fix, if they are one."""
        work = self._work
        for change in changes:
            work = change.turn(work)
        ledger = predict(self._shape, work, self._verdict.machine)
        if lacking(ledger, self._verdict.budgets):
            return None
        settings = dict.fromkeys(setting for change in changes for setting in change.settings)
        return Fix(tuple(settings), work, self._verdict.budgets, ledger)

    def together(self, changes: list[_Change]) -> Fix | None:
        """The first of ever more changes that fits, without those that it does not need, worst harm first."""
        counts = range(2, len(changes) + 1)
        needed = next((list(changes[:n]) for n in counts if self.fix(*changes[:n])), [])
        for change in reversed(needed[:-1]):
            fewer = [other for other in needed if other is not change]
            needed = fewer if self.fix(*fewer) else needed
        return self.fix(*needed) if needed else None


def _gib(nbytes: int) -> str:
    if nbytes < MIB:
        return f"{nbytes:,} bytes"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
