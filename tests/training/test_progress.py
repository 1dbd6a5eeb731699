"""What a run prints, in a pipe and on a terminal."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.training.progress import (
    Progress,
    StepReport,
    bar,
    duration,
    fresh,
    loss_text,
    resumed,
)

GIB = 2**30
BUDGETS = {"device": int(23.5 * GIB), "host": 48 * GIB}
STEP = StepReport(
    number=1,
    loss=1.412,
    eval_loss=None,
    lr=8.1e-6,
    norm=0.83,
    offender=None,
    skipped=0,
    tokens=65536,
    trained=60000,
    seconds=47.1,
    stall=0.3,
    held={"device": int(21.2 * GIB), "host": 34 * GIB},
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    reports: list[StepReport], steps: int, *, done: int = 0, pause: float = 0.0, **console: int
) -> list[str]:
    """Lines printed; ``pause`` seconds go by before each step beside the step itself."""
    clock, file = Clock(), io.StringIO()
    with Progress(steps, done, BUDGETS, console=Console(file=file, **console), clock=clock) as progress:
        for report in reports:
            clock.now += report.seconds + pause
            progress.step(report)
    return file.getvalue().splitlines()


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split("/")[0].removeprefix("step")) for line in lines]


def test_plain_line() -> None:
    assert run([replace(STEP, number=128, eval_loss=1.478)], 412) == [
        "step 128/412  loss 1.412  eval 1.478  lr 8.1e-06  |g| 0.83  1,391 tok/s  "
        "device 21.2/23.5  host 34.0/48 GiB  stall 0.6 %  3 h 43 min left"
    ]


def test_fast_runs_show_first_last_tenths_and_evaluations() -> None:
    reports = [replace(STEP, number=n, seconds=0.01) for n in range(1, 413)]
    reports[299] = replace(reports[299], eval_loss=1.5)
    shown = numbers(run(reports, 412))
    assert shown == [1, 42, 83, 124, 165, 206, 248, 289, 300, 330, 371, 412]


def test_slow_runs_show_a_step_every_half_minute() -> None:
    reports = [replace(STEP, number=n, seconds=12) for n in range(1, 11)]
    assert numbers(run(reports, 1000)) == [1, 4, 7, 10]


def test_a_resumed_run_shows_its_first_step() -> None:
    reports = [replace(STEP, number=n, seconds=0.01) for n in (101, 102)]
    assert numbers(run(reports, 412, done=100)) == [101]


def test_latest_evaluation_stays() -> None:
    reports = [replace(STEP, number=1, eval_loss=2.0), replace(STEP, number=2)]
    assert "eval 2.000" in run(reports, 2)[1]


def test_skipped_step_is_warned_of_before_its_line() -> None:
    skip = replace(STEP, number=97, loss=float("nan"), norm=float("inf"), offender="layers.11.mlp", skipped=1)
    warning, line = run([skip], 412)
    assert warning == "! step 97 skipped: gradient not finite in layers.11.mlp (1 so far)"
    assert "loss nan" in line and "|g| inf" in line


def test_time_left_ignores_an_outlier_and_counts_what_lies_between_steps() -> None:
    reports = [replace(STEP, number=n, seconds=1000 if n == 3 else 60, eval_loss=1.0) for n in range(1, 6)]
    assert run(reports, 10)[-1].endswith(" 5 min 0 s left")
    assert run(reports, 10, pause=12)[-1].endswith(" 6 min 0 s left")


def test_speed_and_stall_are_those_of_recent_steps() -> None:
    slow = [replace(STEP, number=n, seconds=100, stall=50) for n in range(1, 6)]
    fast = [replace(STEP, number=n, seconds=1, stall=0, tokens=500) for n in range(6, 41)]
    assert "  500 tok/s" in (last := run([*slow, *fast], 40)[-1])
    assert "stall 0.0 %" in last


def test_small_budgets_are_shown_in_mib() -> None:
    file = io.StringIO()
    with Progress(2, 0, {"ram": 900 * 2**20}, console=Console(file=file)) as progress:
        progress.step(replace(STEP, held={"ram": 2**29}))
    assert "  ram 512.0/900 MiB  " in file.getvalue()


def terminal(lines: list[str]) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "\n".join(lines))


def test_live_display_has_two_lines_that_fit() -> None:
    reports = [replace(STEP, number=128, eval_loss=1.478)]
    text = terminal(run(reports, 412, force_terminal=True, width=82))
    first, second = text.splitlines()[-2:]
    assert first == "128/412 ━━━━━╸───────────── loss 1.412 eval 1.478 lr 8.1e-06 |g| 0.83 1,391 tok/s"
    assert second == "        device 21.2/23.5  host 34.0/48 GiB  stall 0.6 %  3 h 43 min left"
    assert len(first) < 82
    assert "  0/412" in text


@pytest.mark.parametrize("width", [20, 40, 60, 75, 120])
def test_live_display_never_wraps(width: int) -> None:
    text = terminal(run([replace(STEP, number=128)], 412, force_terminal=True, width=width))
    assert max(map(len, re.split(r"[\r\n]", text))) <= width
    assert ("━" in text) == (width >= 60)


def test_live_display_prints_warnings_above_itself() -> None:
    skip = replace(STEP, number=97, offender="layers.11.mlp", skipped=1)
    text = terminal(run([skip], 412, force_terminal=True, width=100))
    assert text.index("! step 97 skipped") < text.rindex("97/412")


def test_live_display_draws_the_last_of_many_fast_steps() -> None:
    reports = [replace(STEP, number=n, seconds=0.001) for n in range(1, 51)]
    text = terminal(run(reports, 50, force_terminal=True, width=100))
    assert text.count("/50") < 10
    assert "50/50" in text


def test_markup_in_names_is_text() -> None:
    skip = replace(STEP, offender="layers[0].[bold]mlp", skipped=1)
    assert "in layers[0].[bold]mlp (" in run([skip], 412)[0]


def test_first_lines() -> None:
    metrics = Path("runs/qwen3-8b/metrics.jsonl")
    assert fresh({"compute": 16}, metrics) == "fresh run · 16 threads · runs/qwen3-8b/metrics.jsonl"
    assert fresh({"cpu": 1}, metrics) == "fresh run · 1 thread · runs/qwen3-8b/metrics.jsonl"
    line = resumed(100, Path("runs/qwen3-8b/checkpoint-100"), {"compute": 14, "cpu": 2}, metrics)
    assert line.startswith(
        "resumed at step 100 from runs/qwen3-8b/checkpoint-100 · 14 compute + 2 cpu threads · "
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.243, "243 ms"),
        (4.2, "4.2 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (125, "2 min 5 s"),
        (599.7, "10 min"),
        (3240, "54 min"),
        (3599, "1 h 0 min"),
        (13380, "3 h 43 min"),
        (86399, "1 d 0 h"),
        (187200, "2 d 4 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(share=st.floats(0, 1), width=st.integers(1, 50), ascii_only=st.booleans())
def test_bar_is_as_wide_as_asked(share: float, width: int, ascii_only: bool) -> None:
    done, rest = bar(share, width, ascii_only=ascii_only)
    assert len(done) + len(rest) == width
    assert abs(len(done) - share * width) <= 1
    assert (done + rest).isascii() == ascii_only


def test_loss_text() -> None:
    assert [loss_text(x) for x in (11.25, 0.09, 0.0032, float("nan"))] == [
        "11.250",
        "0.090",
        "3.2e-03",
        "nan",
    ]


def test_record_leaves_out_what_does_not_apply() -> None:
    record = STEP.record()
    assert record["step"] == 1
    assert record["skipped"] == 0
    assert not {"number", "eval_loss", "offender"} & record.keys()
    assert replace(STEP, eval_loss=0.0).record()["eval_loss"] == 0.0


def test_the_first_line_says_what_numbers_of_threads_come_from():
    metrics = Path("metrics.jsonl")
    both = {"compute": 4, "update": 4}
    assert (
        fresh(both, metrics, {"compute": "affinity", "update": "affinity"})
        == "fresh run · 4 compute + 4 update threads (affinity) · metrics.jsonl"
    )
    assert (
        fresh({"compute": 1, "update": 4}, metrics, {"compute": "OMP_NUM_THREADS=1", "update": "affinity"})
        == "fresh run · 1 compute (OMP_NUM_THREADS=1) + 4 update (affinity) threads · metrics.jsonl"
    )
    assert "· 4 compute + 4 update (affinity) threads ·" in fresh(both, metrics, {"update": "affinity"})
    line = resumed(2, Path("c-2"), both, metrics, {"compute": "as at its start", "update": "as at its start"})
    assert "· 4 compute + 4 update threads (as at its start) ·" in line
