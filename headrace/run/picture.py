"""A run as one picture: the losses, memory predicted and measured by purpose, and what its lanes did when."""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.lanes.trace import WORDS, Record, lane_order, step_spans
from headrace.ledger import PURPOSES, TIERS
from headrace.run.show import Findings
from headrace.schedule.action import Kind
from headrace.training.progress import duration

SHOWN_STEPS = 2
"""Recorded steps that the picture shows; more are too narrow to read."""

_WIDTH = 10.0  # inches
_GIB, _MIB = 2**30, 2**20
_SMOOTHED_FROM = 60  # steps from which on single losses are too noisy to see their course
_INK, _FAINT, _TRAIN, _EVAL, _SKIPPED = "#222222", "#c9ced6", "#0072b2", "#d55e00", "#cc3311"
_PREDICTED, _MEASURED = "#a9c7de", "#0072b2"
_COLOURS = {  # Okabe and Ito's palette, which the colour-blind tell apart, and two more
    Kind.FORWARD: "#56b4e9",
    Kind.BACKWARD: "#0072b2",
    Kind.DOWN: "#e69f00",
    Kind.NORM: "#cc79a7",
    Kind.CLIP: "#777777",
    Kind.UPDATE: "#d55e00",
    Kind.UP: "#009e73",
    Kind.READ: "#f0e442",
    Kind.WRITE: "#8c6d31",
}
_PURPOSES = {"states": "master + moments", "other": "Python, torch"}
_LANES = {"d2h": "d2h (down)", "h2d": "h2d (up)", "cpu": "cpu (update)"}

Axes = Any
Figure = Any
"""Both matplotlib's, which is an extra and known only once a picture is drawn."""


def draw(found: Findings, out: Path) -> None:
    """Draw what is known of a run into ``out``, in the format that its suffix names.

    Raises UserError when matplotlib is missing, knows no such format, or ``out`` cannot be written.
    """
    figure = picture(found)
    formats = figure.canvas.get_supported_filetypes()
    if out.suffix.lstrip(".").lower() not in formats:
        raise UserError(
            f"--picture {out} has no suffix of a picture: give one of {', '.join(sorted(formats))}"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise UserError(f"--picture {out} cannot be written ({error.strerror}): give another path") from error


def picture(found: Findings) -> Figure:
    """The picture: losses, memory and lanes, one below the other, each as high as what it shows.

    Raises UserError when matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--picture needs a package that is missing: pip install headrace[plots]")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    bars = memory_bars(found)
    lanes = lane_order(found.trace)
    heights = [2.6, 0.7 + 0.34 * max(1, len(bars)), 0.9 + 0.42 * max(1, len(lanes))]
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1)
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(shortened(found.title), fontsize=11, color=_INK)
    panels = figure.subplots(3, 1, height_ratios=heights)
    _losses(panels[0], found.metrics)
    _memory(panels[1], bars)
    _gantt(panels[2], last_steps(found.trace), lanes, _pace(found.metrics))
    return figure


# -- losses ------------------------------------------------------------------------------------------------


def _losses(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    _frame(axes, "Loss")
    axes.set_xlabel("step")
    if not metrics:
        _nothing(axes, "no step yet")
        return
    steps = [record["step"] for record in metrics]
    losses = [_number(record["loss"]) for record in metrics]
    many = len(steps) >= _SMOOTHED_FROM
    marker = "o" if len(steps) == 1 else None
    axes.plot(
        steps, losses, color=_TRAIN, lw=1, alpha=0.3 if many else 1, marker=marker, label="train, a step"
    )
    if many:
        axes.plot(steps, smoothed(losses), color=_TRAIN, lw=1.8, label="train, smoothed")
    evaluated = [
        (record["step"], _number(record["eval_loss"])) for record in metrics if "eval_loss" in record
    ]
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), color=_EVAL, lw=1.5, marker="o", ms=4, label="eval")
    skipped = [record["step"] for record in metrics if "offender" in record]
    for number, step in enumerate(skipped):
        axes.axvline(step, color=_SKIPPED, lw=1, ls=":", label="skipped step" if number == 0 else None)
    axes.locator_params(axis="x", integer=True)
    axes.margins(x=0.01)
    _legend_above(axes)


def smoothed(losses: Sequence[float]) -> list[float]:
    """An exponential mean over about a thirtieth of the run, without the first values' weight (Adam's bias
    correction); steps without a finite loss carry on what was before.
    """
    keep = 1 - 1 / max(2.0, len(losses) / 30)
    mean, weight, found = 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        found.append(mean / weight if weight else math.nan)
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# -- memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """Bytes of one purpose, or the peak of a tier; a figure is None where there is none."""

    label: str
    predicted: int
    measured: int | None


def memory_bars(found: Findings) -> list[Bar]:
    """Predicted and measured peaks, tier by tier: its purposes, then the whole."""
    ledgers = [found.predicted, *([found.measured] if found.measured else [])]
    tiers = [tier for tier in TIERS if any(tier in ledger.peaks for ledger in ledgers)]
    return [bar for tier in tiers for bar in _bars(tier, found, f"{tier}: " if len(tiers) > 1 else "")]


def _bars(tier: str, found: Findings, prefix: str) -> Iterator[Bar]:
    predicted = found.predicted.peaks.get(tier, {})
    measured = found.measured.peaks.get(tier, {}) if found.measured else {}
    for purpose in PURPOSES:
        if predicted.get(purpose) or measured.get(purpose):
            name = "CUDA" if (tier, purpose) == ("device", "other") else _PURPOSES.get(purpose, purpose)
            yield Bar(prefix + name, predicted.get(purpose, 0), measured.get(purpose))
    yield Bar(f"{tier} peak", found.predicted.total(tier), _peak(tier, found))


def _peak(tier: str, found: Findings) -> int | None:
    """From the ledger, or, while the run goes on, from its last step."""
    if found.measured is not None:
        return found.measured.total(tier) or None
    held: Mapping[str, int] = found.metrics[-1].get("held", {}) if found.metrics else {}
    return held.get(tier)


def _memory(axes: Axes, bars: Sequence[Bar]) -> None:
    largest = max((max(bar.predicted, bar.measured or 0) for bar in bars), default=0)
    unit, name = (_GIB, "GiB") if largest >= 4 * _GIB else (_MIB, "MiB")
    _frame(axes, "Memory, predicted and measured", grid="x")
    axes.set_xlabel(name)
    if not bars:
        _nothing(axes, "no prediction in this run's plan")
        return
    for place, bar in enumerate(bars):
        _bar(axes, place - 0.19, bar.predicted / unit, _PREDICTED, "predicted" if place == 0 else None)
        if bar.measured is not None:
            _bar(axes, place + 0.19, bar.measured / unit, _MEASURED, None)
    axes.barh([0], [0], color=_MEASURED, label="measured")
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * largest / unit)
    axes.tick_params(axis="y", length=0)
    _legend_above(axes)


def _bar(axes: Axes, place: float, length: float, colour: str, label: str | None) -> None:
    axes.barh([place], [length], height=0.36, color=colour, label=label)
    digits = 1 if length < 100 else 0
    text = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5, "color": _INK}
    axes.annotate(f"{length:,.{digits}f}", (length, place), **text)


# -- lanes -------------------------------------------------------------------------------------------------


def last_steps(trace: Sequence[Record]) -> list[Record]:
    """The records of the last :data:`SHOWN_STEPS` steps."""
    steps = sorted({record.step for record in trace})[-SHOWN_STEPS:]
    return [record for record in trace if record.step in steps]


def _pace(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Seconds and stall of a step, over all steps."""
    seconds = sum(record["seconds"] for record in metrics)
    if not seconds:
        return ""
    stall = sum(record["stall"] for record in metrics) / seconds
    return f": {duration(seconds / len(metrics))} a step, compute waits {100 * stall:.1f} % of it"


def _gantt(axes: Axes, records: Sequence[Record], lanes: Sequence[str], pace: str) -> None:
    _frame(axes, f"Lanes{pace}", grid="x")
    if not records:
        _nothing(axes, "no trace yet: the first checkpoint writes it")
        return
    spans = step_spans(records)
    begin, end = spans[0][1], max(last for _, _, last in spans)
    scale, unit = (1e3, "ms") if end - begin < 2 else (1.0, "s")
    axes.set_xlabel(f"{unit} since the start of step {spans[0][0] + 1:,}")
    for kind in (kind for kind in Kind if any(r.action.kind is kind for r in records)):
        for place, lane in enumerate(lanes):
            ran = [
                (scale * (r.start - begin), scale * (r.end - r.start)) for r in records if _is(r, kind, lane)
            ]
            axes.broken_barh(ran, (place - 0.38, 0.76), color=_COLOURS[kind], lw=0)
        axes.barh([0], [0], color=_COLOURS[kind], label=WORDS[kind])
    for step, start, _ in spans:
        axes.axvline(scale * (start - begin), color=_INK, lw=0.8, ls="--")
        beside = {
            "xytext": (3, 1),
            "textcoords": "offset points",
            "va": "bottom",
            "fontsize": 8,
            "color": _INK,
        }
        axes.annotate(f"step {step + 1:,}", (scale * (start - begin), -0.5), **beside)
    axes.set_yticks(range(len(lanes)), [_LANES.get(lane, lane) for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.85)
    axes.set_xlim(-0.005 * scale * (end - begin), 1.005 * scale * (end - begin))
    axes.tick_params(axis="y", length=0)
    below = 0.5 / (0.42 * len(lanes) + 0.2)  # half an inch, in heights of the axes
    _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -below))


def _is(record: Record, kind: Kind, lane: str) -> bool:
    return record.action.kind is kind and record.action.lane == lane


# -- all ---------------------------------------------------------------------------------------------------


def _frame(axes: Axes, title: str, grid: str = "both") -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.grid(axis=grid, color=_FAINT, lw=0.5, alpha=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=_INK)
    axes.xaxis.label.set_size(8.5)


def _legend_above(axes: Axes) -> None:
    """In the line of the title, where no curve and no bar can be."""
    _legend(axes, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)


def _legend(axes: Axes, **where: Any) -> None:
    axes.legend(frameon=False, ncols=9, fontsize=8.5, columnspacing=1.2, handlelength=1.6, **where)


def shortened(text: str, most: int = 110) -> str:
    """``text``, its middle left out where it is longer than a line of the picture."""
    half = most // 2 - 1
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_INK, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)
