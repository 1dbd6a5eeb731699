"""What there is to say about a run's directory, during and after the run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.run.directory import RunDirectory
from headrace.training.closing import comparison_table
from headrace.training.metrics import read_metrics
from headrace.training.progress import duration, loss_text

_LANES_SHOWN = ("compute", "d2h", "cpu", "h2d")


def describe(run: str | Path) -> list[str]:
    """A run's model, progress, checkpoints, and its predicted beside its measured ledger.

    Raises UserError when the directory holds no run.
    """
    directory = RunDirectory(run)
    tree = directory.read_plan()
    model, policy = tree["model"], tree["update"]["policy"]
    lines = [f"{directory.path}: {model['path']}, {model['dtype']}, update {policy}"]
    lines += _progress(directory)
    if directory.ledger.exists():
        lines += _ledgers(directory.ledger)
    if directory.model.is_dir():
        lines.append(f"Model  {directory.model}")
    return lines


def _progress(directory: RunDirectory) -> Iterator[str]:
    records = read_metrics(directory.metrics) if directory.metrics.exists() else []
    if not records:
        yield "no step yet"
        return
    first, last = records[0], records[-1]
    evaluated = [record["eval_loss"] for record in records if "eval_loss" in record]
    text = f"step {last['step']:,}: loss {_loss(first['loss'])} → {_loss(last['loss'])}"
    text += f", eval {_loss(evaluated[-1])}" if evaluated else ""
    yield text + (f", {last['skipped']} skipped" if last.get("skipped") else "")
    checkpoints = sorted(directory.path.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        yield f"checkpoints: {', '.join(path.name for path in checkpoints)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else loss_text(value)


def _ledgers(path: Path) -> list[str]:
    try:
        both: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        predicted, measured = Ledger.from_json(both["predicted"]), Ledger.from_json(both["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): it is written anew at the end of the run") from None
    return [*comparison_table(predicted, measured), *_lanes(measured)]


def _lanes(measured: Ledger) -> Iterator[str]:
    """Busy and stalled seconds of a step, lane by lane."""
    steps = max(1, measured.steps)
    yield "lane      busy a step   compute waited"
    for lane in _LANES_SHOWN:
        stalled = measured.stalls.get(lane, 0.0) / steps
        waited = duration(stalled) if stalled else ""
        yield f"  {lane:7} {duration(measured.lane_seconds(lane) / steps):>11}   {waited:>14}"
