"""What the user sees at the end of a run: its outcome, and the predicted account beside the measured one."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.ledger import PURPOSES, Comparison, Ledger, compare
from headrace.training.progress import duration, loss_text

_LANES = {"d2h": "down", "h2d": "up"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Outcome:
    """A finished run in numbers; losses are None where there were none.

    Attributes:
        steps: optimizer steps of the run.
        seconds: wall-clock time of the session.
        first_loss: of the first step.
        last_loss: of the last step.
        eval_loss: of the last evaluation.
        skipped: steps skipped because of a gradient that was not finite.
        skipped_at_end: how many of them are the run's last steps.
    """

    steps: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    skipped: int
    skipped_at_end: int = 0


def closing(outcome: Outcome, predicted: Ledger, measured: Ledger) -> list[str]:
    """What stands at the end of a run: one line of it in numbers, then the predicted against the measured."""
    parts = [_count(outcome.steps), duration(outcome.seconds)]
    if outcome.first_loss is not None and outcome.last_loss is not None:
        parts.append(f"loss {loss_text(outcome.first_loss)} → {loss_text(outcome.last_loss)}")
    if outcome.eval_loss is not None:
        parts.append(f"eval {loss_text(outcome.eval_loss)}")
    if outcome.skipped:
        parts.append(f"{_count(outcome.skipped)} skipped")
    lines = [f"Done: {', '.join(parts)}"]
    if outcome.skipped_at_end:
        lines.append(
            f"! the last {_count(outcome.skipped_at_end)} changed nothing, for a gradient was not finite: "
            f"the model is that of step {outcome.steps - outcome.skipped_at_end}; lower optim.lr, or look at "
            "the data"
        )
    return [*lines, *comparison_table(predicted, measured)]


def comparison_table(predicted: Ledger, measured: Ledger) -> list[str]:
    """Predicted and measured figures side by side, in aligned columns.

    A purpose has a line of its own, indented below its tier, where it is noticeably off the prediction.
    """
    lines = (line for line in compare(predicted, measured) if line.noticeable or not _is_purpose(line))
    rows = [*(_row(line) for line in lines), *_time_rows(predicted, measured)]
    names, numbers, units = (max((len(text) for text in column), default=0) for column in _columns(rows))
    header = f"{'':{names}}  {'predicted':>{max(9, numbers + 1 + units)}}  {'measured':>9}"
    return [header, *(row.text(names, max(numbers, 8 - units), units) for row in rows)]


@dataclass(frozen=True)
class _Row:
    name: str
    predicted: str
    unit: str
    measured: str
    difference: str
    verdict: str

    def text(self, names: int, numbers: int, units: int) -> str:
        prediction = f"{self.name:{names}}  {self.predicted:>{numbers}} {self.unit:{units}}"
        return f"{prediction}  {self.measured:>9}  {self.difference:>8}  {self.verdict}".rstrip()


def _columns(rows: list[_Row]) -> tuple[list[str], list[str], list[str]]:
    return [row.name for row in rows], [row.predicted for row in rows], [row.unit for row in rows]


def _row(line: Comparison) -> _Row:
    power = 0
    if line.unit == "bytes":
        while max(line.predicted, line.measured) >= 1024 ** (power + 1) and power + 1 < len(_UNITS):
            power += 1
    predicted, measured = (f"{value / 1024**power:.1f}" for value in (line.predicted, line.measured))
    unit = _UNITS[power] if line.unit == "bytes" else "s"
    return _Row(_name(line), predicted, unit, measured, _percent(line.difference), _verdict(line))


def _time_rows(predicted: Ledger, measured: Ledger) -> Iterator[_Row]:
    """Seconds and stall of a step; a prediction without time shows a dash."""
    if not measured.seconds or not measured.steps:
        return
    seconds = measured.seconds / measured.steps
    if predicted.seconds:
        yield _row(Comparison("step", predicted.seconds / max(1, predicted.steps), seconds, "seconds"))
    else:
        yield _Row("step", "–", "s", f"{seconds:.1f}", "", "")
    expected = f"{100 * sum(predicted.stalls.values()) / predicted.seconds:.1f}" if predicted.seconds else "–"
    stalled = sum(measured.stalls.values())
    yield _Row(
        "stall", expected, "%", f"{100 * stalled / measured.seconds:.1f}", "", _longest_stall(measured)
    )


def _longest_stall(measured: Ledger) -> str:
    if not any(measured.stalls.values()):
        return ""
    lane = max(measured.stalls, key=measured.stalls.__getitem__)
    return f"{duration(measured.stalls[lane] / measured.steps)} a step on {lane}"


def _is_purpose(line: Comparison) -> bool:
    return line.name.rpartition(" ")[2] in PURPOSES


def _name(line: Comparison) -> str:
    first, _, rest = line.name.partition(" ")
    return f"  {rest}" if _is_purpose(line) else f"{_LANES.get(first, first)} {rest}".rstrip()


def _percent(share: float) -> str:
    if share == float("inf"):
        return "new"
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


def _verdict(line: Comparison) -> str:
    if not line.noticeable:
        return "ok"
    if not line.predicted:
        return "! not predicted"
    return f"! {'above' if line.measured > line.predicted else 'below'} the prediction"


def _count(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"
