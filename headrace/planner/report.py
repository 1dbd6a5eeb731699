"""Prints a predicted ledger: where every byte lives, against the budgets."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from headrace.ledger import PURPOSES, Ledger
from headrace.machine.machine import TIERS, Machine
from headrace.planner.fit import NAMES
from headrace.planner.workload import Workload

MIB, GIB = 2**20, 2**30

_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "states": "master + moments",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "other": "Python, torch",
}
_EIGHTHS = " ▏▎▍▌▋▊▉"
_CELLS = 6


def memory_table(ledger: Ledger, machine: Machine, work: Workload | None = None) -> str:
    """Purposes by tier, each tier's peak, its budget, and the share of it that is taken.

    All figures are in one unit, named in the first cell: GiB, or MiB for small models.

    Args:
        ledger: as predicted.
        machine: its tiers are the budgets.
        work: tells more of what each purpose holds.
    """
    tiers = [tier for tier in TIERS if ledger.total(tier)]
    unit = unit_of(max((ledger.total(tier) for tier in tiers), default=0))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("GiB" if unit == GIB else "MiB")
    for tier in tiers:
        table.add_column(NAMES[tier], justify="right")
    for label, figures in _rows(ledger, machine, tiers, labels(machine, work)):
        table.add_row(label, *(_figure(nbytes, unit) for nbytes in figures))
    table.add_row("", *(_share(ledger.total(tier), machine.tiers.get(tier, 0)) for tier in tiers))
    return _text(table)


def labels(machine: Machine, work: Workload | None) -> dict[str, str]:
    """Purpose -> what it holds on this machine, and in this workload if that is told."""
    found = dict(_LABELS) if machine.unified else {**_LABELS, "other": f"CUDA, {_LABELS['other']}"}
    if work is None:
        return found
    chunk = min(work.loss_chunk, work.tokens)
    found |= {"activations": f"activations ({work.activations})", "logits": f"logits (chunks of {chunk})"}
    return found | ({"gradients": "gradients (fp32 sums)"} if work.micro_batches > 1 else {})


def unit_of(largest: int) -> int:
    """Bytes of the unit in which a table is printed whose largest figure is ``largest``."""
    return GIB if largest >= 4 * GIB else MIB


def bar(share: float, cells: int = _CELLS) -> str:
    """A bar as long as ``share`` of ``cells`` blocks, to an eighth of a block, and at most ``cells``."""
    full, part = divmod(round(min(1.0, share) * cells * 8), 8)
    return "█" * full + _EIGHTHS[part].strip()


def _rows(
    ledger: Ledger, machine: Machine, tiers: list[str], labels: dict[str, str]
) -> list[tuple[str, list[int]]]:
    held = {purpose: [ledger.peaks.get(tier, {}).get(purpose, 0) for tier in tiers] for purpose in PURPOSES}
    rows = [(labels[purpose], figures) for purpose, figures in held.items() if any(figures)]
    totals = [ledger.total(tier) for tier in tiers]
    # Purposes peak at different moments, so a tier's peak can be less than the sum of its column.
    together = totals == [sum(column) for column in zip(*held.values(), strict=True)]
    rows.append(("total" if together else "highest at one time", totals))
    return [*rows, ("budget", [machine.tiers.get(tier, 0) for tier in tiers])]


def _figure(nbytes: int, unit: int) -> str:
    figure = f"{nbytes / unit:,.1f}"
    return "" if not nbytes else "<0.1" if figure == "0.0" else figure


def _share(nbytes: int, budget: int) -> str:
    if not budget:
        return ""
    share = nbytes / budget
    return f"{bar(share)} {share:.0%}" if share < 10 else f"{bar(share)} >999%"


def _text(table: Table) -> str:
    """What rich prints to something that is no terminal."""
    console = Console(file=StringIO(), width=100, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
