"""What the user sees while a run goes on: the first line, then a live display or plain lines."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

RECENT = 20
"""Steps over which speed, stall and the time left are taken."""

QUIET = 30.0
"""Without a terminal: seconds after which a step is shown even if nothing notable happened."""

_REFRESH = 0.1  # on a terminal: fewest seconds between two pictures; the last one is always drawn
_BAR = (6, 30)  # fewest and most columns of the bar


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step was.

    Attributes:
        number: steps done, this one included.
        loss: mean over the step's trained tokens.
        eval_loss: mean over the held-out trained tokens, where this step was followed by an evaluation.
        lr: learning rate of the step.
        norm: global gradient norm before clipping.
        offender: the parameter whose gradient was not finite; the step was skipped then.
        skipped: skipped steps of the whole run so far.
        tokens: tokens of the step, padding apart.
        trained: tokens with a label.
        seconds: wall-clock time of the step, evaluation apart.
        stall: seconds of these in which compute waited for another lane.
        held: highest bytes held so far, by tier.
    """

    number: int
    loss: float
    eval_loss: float | None
    lr: float
    norm: float
    offender: str | None
    skipped: int
    tokens: int
    trained: int
    seconds: float
    stall: float
    held: Mapping[str, int] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The step as an object of metrics.jsonl; what does not apply to it is left out."""
        values = {name: value for name, value in asdict(self).items() if value not in (None, {})}
        return {"step": values.pop("number"), **values}


def fresh(
    threads: Mapping[str, int], metrics: Path, origins: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The first line of a run from the start; ``origins`` says what numbers of threads come from."""
    return f"fresh run · {_threads(threads, origins)} · {metrics}"


def resumed(
    step: int,
    checkpoint: Path,
    threads: Mapping[str, int],
    metrics: Path,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The first line of a run that goes on from ``checkpoint``, taken after ``step`` steps."""
    return f"resumed at step {step:,} from {checkpoint} · {_threads(threads, origins)} · {metrics}"


def finished(steps: int, model: Path) -> str:
    """The only line of a run that has nothing left to do."""
    return f"already finished: {steps:,} steps done · {model}"


def _threads(threads: Mapping[str, int], origins: Mapping[str, str]) -> str:
    """``14 compute + 2 cpu threads (affinity)``, with a reason for each where they differ."""
    reasons = {origins.get(lane, "") for lane in threads}
    shared = reasons.pop() if len(reasons) == 1 else ""
    lanes = " + ".join(
        (f"{count} {lane}" if len(threads) > 1 else f"{count}")
        + (f" ({origins[lane]})" if lane in origins and not shared else "")
        for lane, count in threads.items()
    )
    plural = "" if list(threads.values()) == [1] else "s"
    return f"{lanes} thread{plural}{f' ({shared})' if shared else ''}"


class Progress:
    """Shows a run: live on a terminal, as plain lines elsewhere. A context manager.

    Args:
        steps: optimizer steps of the whole run.
        done: steps done before, in a resumed run.
        budgets: bytes that each tier may hold; tiers are shown in this order.
        console: where to; standard output by default.
        clock: seconds that only ever grow.
    """

    def __init__(
        self,
        steps: int,
        done: int,
        budgets: Mapping[str, int],
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = _Output(file=sys.stdout) if console is None else console
        self._pace = _Pace(steps, clock)
        self._budgets = budgets
        self._eval_loss: float | None = None
        view = _LiveView if self._console.is_terminal else _PlainView
        self._view = view(self._console, steps, done, clock)

    def __enter__(self) -> "Progress":
        self._view.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._view.close()

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the live display."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that asks for attention."""
        self.say(f"! {text}", "yellow")

    def step(self, report: StepReport) -> None:
        """Show a step, after a warning if it was skipped."""
        if report.offender is not None:
            why = f"gradient not finite in {report.offender}"
            self.warn(f"step {report.number:,} skipped: {why} ({report.skipped:,} so far)")
        self._pace.add(report)
        self._eval_loss = self._eval_loss if report.eval_loss is None else report.eval_loss
        self._view.show(report, self._values(report), self._resources(report))

    def _values(self, report: StepReport) -> list[str]:
        evaluated = [] if self._eval_loss is None else [f"eval {loss_text(self._eval_loss)}"]
        return [
            f"loss {loss_text(report.loss)}",
            *evaluated,
            f"lr {report.lr:.1e}",
            f"|g| {report.norm:.2f}" if 0.01 <= report.norm < 1000 else f"|g| {report.norm:.1e}",
            f"{self._pace.tokens_per_second:,.0f} tok/s",
        ]

    def _resources(self, report: StepReport) -> list[str]:
        stall, left = f"stall {100 * self._pace.stall:.1f} %", self._pace.seconds_left
        return [*_memory(report.held, self._budgets), stall, *([f"{duration(left)} left"] if left else [])]


class _Output(Console):
    """Tells of a closed pipe, at which rich would end the process without a word."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError at hand


class _Pace:
    """Speed over the recent steps, and the time left.

    The time left is the median of the recent steps, which one slow step doesn't move, plus what went to
    evaluations and checkpoints, by step over the whole session.
    """

    def __init__(self, steps: int, clock: Callable[[], float]) -> None:
        self._steps = steps
        self._clock = clock
        self._start = clock()
        self._recent: deque[StepReport] = deque(maxlen=RECENT)
        self._count = 0
        self._busy = 0.0

    def add(self, report: StepReport) -> None:
        self._recent.append(report)
        self._count += 1
        self._busy += report.seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(report.tokens for report in self._recent) / self._seconds

    @property
    def stall(self) -> float:
        return sum(report.stall for report in self._recent) / self._seconds

    @property
    def seconds_left(self) -> float:
        step = median(report.seconds for report in self._recent)
        beside = max(0.0, self._clock() - self._start - self._busy) / self._count
        return (self._steps - self._recent[-1].number) * (step + beside)

    @property
    def _seconds(self) -> float:
        return max(1e-9, sum(report.seconds for report in self._recent))


class _PlainView:
    """A line for the first and the last step, each tenth of a run, each evaluation, and every half minute."""

    def __init__(self, console: Console, steps: int, done: int, clock: Callable[[], float]) -> None:
        self._console = console
        self._steps = steps
        self._clock = clock
        self._shown_at = -math.inf
        self._tenth = 10 * done // steps

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def show(self, report: StepReport, values: Sequence[str], resources: Sequence[str]) -> None:
        now, tenth = self._clock(), 10 * report.number // self._steps
        if tenth == self._tenth and report.eval_loss is None and now - self._shown_at < QUIET:
            return
        self._shown_at, self._tenth = now, tenth
        line = "  ".join([f"step {_of(report.number, self._steps)}", *values, *resources])
        self._console.print(Text(line), soft_wrap=True)


class _LiveView:
    """Two lines at the bottom of the terminal: bar and values, then memory, stall and the time left."""

    def __init__(self, console: Console, steps: int, done: int, clock: Callable[[], float]) -> None:
        self._console = console
        self._steps = steps
        self._clock = clock
        self._shown_at = -math.inf
        self._live = Live(self._lines(done, [], ["first step"]), console=console, auto_refresh=False)

    def open(self) -> None:
        self._live.start(refresh=True)

    def close(self) -> None:
        self._live.stop()

    def show(self, report: StepReport, values: Sequence[str], resources: Sequence[str]) -> None:
        now = self._clock()
        due = now - self._shown_at >= _REFRESH
        self._shown_at = now if due else self._shown_at
        self._live.update(self._lines(report.number, values, resources), refresh=due)

    def _lines(self, number: int, values: Sequence[str], resources: Sequence[str]) -> Text:
        count, text = _of(number, self._steps), " ".join(values)
        fewest, most = _BAR
        width = min(most, self._console.width - len(count) - len(text) - 3)
        lines = Text(count, no_wrap=True, overflow="ellipsis")
        if width >= fewest:
            done, rest = bar(number / self._steps, width, ascii_only=self._console.options.ascii_only)
            lines.append(f" {done}", "green").append(rest, "dim")
        lines.append(f" {text}\n{' ' * (len(count) + 1)}").append("  ".join(resources), "dim")
        return lines


def bar(share: float, width: int, *, ascii_only: bool = False) -> tuple[str, str]:
    """The done and the open part of a bar of ``width`` columns, to half a column."""
    full, half = divmod(int(2 * width * share), 2)
    solid, tip, thin = ("#", "", "-") if ascii_only else ("━", "╸", "─")
    done = solid * full + tip * half
    return done, thin * (width - len(done))


def duration(seconds: float) -> str:
    """Seconds as people say them: ``243 ms``, ``4.2 s``, ``47 s``, ``2 min 5 s``, ``54 min``, ``3 h 43 min``,
    ``2 d 4 h``.
    """
    if seconds < 0.95:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 600:
        return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 24 * 60 else f"{hours // 24} d {hours % 24} h"


def _of(number: int, steps: int) -> str:
    # As wide as it will get, so that what follows stands still.
    return f"{number:>{len(str(steps))}}/{steps}"


def loss_text(loss: float) -> str:
    """A loss with the digits that matter: ``1.412``, ``3.2e-03``."""
    return f"{loss:.3f}" if loss >= 0.01 or not math.isfinite(loss) else f"{loss:.1e}"


def _memory(held: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    power, unit = (3, "GiB") if max(budgets.values(), default=0) >= 2**30 else (2, "MiB")
    figures = [
        f"{tier} {held[tier] / 1024**power:.1f}/{f'{budget / 1024**power:.1f}'.removesuffix('.0')}"
        for tier, budget in budgets.items()
        if tier in held
    ]
    return [*figures[:-1], f"{figures[-1]} {unit}"] if figures else []
