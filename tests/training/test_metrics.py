"""metrics.jsonl survives kills and resumes; TensorBoard gets the same numbers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.training.config import Report
from headrace.training.metrics import Metrics, check_reports, read_metrics


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def write(directory: Path, first: int, last: int, **values: Any) -> Path:
    with Metrics(directory, first - 1) as metrics:
        for step in range(first, last + 1):
            metrics.write({"step": step, "loss": 1 / step, **values})
        return metrics.path


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1, 3, lr=1e-5, held={"ram": 5})
    assert path == tmp_path / "run" / "metrics.jsonl"
    assert read_metrics(path)[2] == {"step": 3, "loss": 1 / 3, "lr": 1e-5, "held": {"ram": 5}}


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    with Metrics(tmp_path, 0) as metrics:
        metrics.write({"step": 1})
        assert steps(metrics.path) == [1]


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 9)
    write(tmp_path, 6, 7)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_fresh_run_starts_over(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 9)
    write(tmp_path, 1, 2)
    assert steps(path) == [1, 2]


whole = b"".join(json.dumps({"step": step, "loss": 0.5}).encode() + b"\n" for step in range(1, 6))


@given(length=st.integers(0, len(whole)), checkpoint=st.integers(0, 5))
def test_killed_at_any_byte(length: int, checkpoint: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("run")
    (directory / "metrics.jsonl").write_bytes(whole[:length])
    complete = list(range(1, whole[:length].count(b"\n") + 1))
    assert steps(directory / "metrics.jsonl") == complete
    write(directory, checkpoint + 1, 7)
    kept = [step for step in complete if step <= checkpoint]
    assert steps(directory / "metrics.jsonl") == [*kept, *range(checkpoint + 1, 8)]


@pytest.mark.parametrize("line", ["not json", "[1]", "{}", '{"step": "3"}', "17", "\x00\x00"])
def test_a_foreign_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, 1, 2)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 3 is not a metrics record"):
        read_metrics(path)


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 1, norm=float("inf"), held={"ram": float("nan")})
    assert "null" in path.read_text()
    assert read_metrics(path)[0] == {"step": 1, "loss": 1, "norm": None, "held": {"ram": None}}


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Metrics(tmp_path, 0, ["tensorboard"]) as metrics:
        for step in range(1, 5):
            metrics.write({"step": step, "loss": step / 2, "held": {"ram": 7}, "offender": "layers.0"})
    with Metrics(tmp_path, 2, ["tensorboard"]) as metrics:
        metrics.write({"step": 3, "loss": 9.0})
    events = accumulator.EventAccumulator(os.fspath(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["held/ram", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 9.0)]


@pytest.mark.parametrize("report", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, report, None)  # Python's own sign for "cannot be imported"
    with pytest.raises(UserError, match=rf"report: \[{report}\] .* pip install headrace\[{report}\]"):
        Metrics(tmp_path / "run", 0, [report])
    assert not (tmp_path / "run").exists()


def test_a_report_that_is_not_there_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_reports(["tensorboard"])
    with pytest.raises(UserError, match="wandb"):
        check_reports(["tensorboard", "wandb"])
