"""What there is to say about a run's directory, during and after the run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.lanes.trace import Record, chrome_trace
from headrace.lanes.trace import read as read_trace
from headrace.ledger import Ledger
from headrace.memory.durable import replace_text
from headrace.run.directory import RunDirectory
from headrace.run.file import validate
from headrace.training.closing import comparison_table
from headrace.training.metrics import read_metrics
from headrace.training.progress import duration, loss_text

_LANES_SHOWN = ("compute", "d2h", "cpu", "h2d")


@dataclass(frozen=True)
class Findings:
    """What a run left in its directory so far.

    Attributes:
        directory: where it lies.
        tree: the plan that it executes, as plain data.
        metrics: one record a step, over all sessions.
        predicted: the ledger of a step.
        measured: the ledger at the end of the run; None before.
        trace: the last steps before the newest checkpoint, action by action; empty before the first.
    """

    directory: RunDirectory
    tree: dict[str, Any]
    metrics: list[dict[str, Any]]
    predicted: Ledger
    measured: Ledger | None
    trace: list[Record]

    @property
    def title(self) -> str:
        """The run in one line: where, which model, which dtype, which policy."""
        model, policy = self.tree["model"], self.tree["update"]["policy"]
        return f"{self.directory.path}: {model['path']}, {model['dtype']}, update {policy}"


def find(run: str | Path) -> Findings:
    """Read what a run's directory holds.

    Raises UserError when it holds no run, or a file of it is damaged.
    """
    directory = RunDirectory(run)
    tree = directory.read_plan()
    validate(tree, str(directory.plan))
    predicted, measured = _ledgers(directory, tree)
    return Findings(
        directory,
        tree,
        read_metrics(directory.metrics) if directory.metrics.exists() else [],
        predicted,
        measured,
        read_trace(directory.trace) if directory.trace.exists() else [],
    )


def describe(found: Findings) -> list[str]:
    """A run's model, progress, checkpoints, and its predicted beside its measured ledger."""
    lines = [found.title, *_progress(found)]
    if found.measured is not None:
        lines += [*comparison_table(found.predicted, found.measured), *_lanes(found.measured)]
    if found.directory.model.is_dir():
        lines.append(f"Model  {found.directory.model}")
    return lines


def write_chrome_trace(found: Findings, out: Path) -> None:
    """Write the recorded steps in Chrome's trace event format, which https://ui.perfetto.dev opens.

    Raises UserError when no step was recorded, or ``out`` cannot be written.
    """
    if not found.trace:
        raise UserError(f"{found.directory.path} has no trace yet: the first checkpoint writes it")
    try:
        replace_text(out, json.dumps(chrome_trace(found.trace), separators=(",", ":")))
    except OSError as error:
        raise UserError(f"--trace {out} cannot be written ({error.strerror}): give another path") from error


def _ledgers(directory: RunDirectory, tree: dict[str, Any]) -> tuple[Ledger, Ledger | None]:
    path = directory.ledger
    if not path.exists():
        return _prediction(directory, tree), None
    try:
        both: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Ledger.from_json(both["predicted"]), Ledger.from_json(both["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): it is written anew at the end of the run") from None


def _prediction(directory: RunDirectory, tree: dict[str, Any]) -> Ledger:
    try:
        return Ledger.from_json(tree["predicted"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{directory.plan} holds no prediction: it is not the plan of a run, give the `out` of a run file"
        ) from None


def _progress(found: Findings) -> Iterator[str]:
    if not found.metrics:
        yield "no step yet"
        return
    first, last = found.metrics[0], found.metrics[-1]
    evaluated = [record["eval_loss"] for record in found.metrics if "eval_loss" in record]
    text = f"step {last['step']:,}: loss {_loss(first['loss'])} → {_loss(last['loss'])}"
    text += f", eval {_loss(evaluated[-1])}" if evaluated else ""
    yield text + (f", {last['skipped']} skipped" if last.get("skipped") else "")
    checkpoints = sorted(found.directory.path.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        yield f"checkpoints: {', '.join(path.name for path in checkpoints)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else loss_text(value)


def _lanes(measured: Ledger) -> Iterator[str]:
    """Busy and stalled seconds of a step, lane by lane."""
    steps = max(1, measured.steps)
    yield "lane       busy a step   compute waited"
    disks = [lane for lane in measured.lanes if lane not in _LANES_SHOWN]
    for lane in (*_LANES_SHOWN, *disks):
        stalled = measured.stalls.get(lane, 0.0) / steps
        waited = duration(stalled) if stalled else ""
        yield f"  {lane:8} {duration(measured.lane_seconds(lane) / steps):>11}   {waited:>14}"
