"""`headrace show` during, after and over several sessions of a run."""

import json
import re

import cli_process
import evidence
import pytest

from headrace.errors import UserError
from headrace.lanes.trace import KEPT_STEPS, step_spans
from headrace.run.picture import memory_bars
from headrace.run.show import describe, find, write_chrome_trace
from headrace.run.train import train
from headrace.training.metrics import read_metrics


@pytest.fixture
def finished(write_run):
    """The directory of a run that was trained to the end."""
    path = write_run()
    train(path)
    return evidence.home(path)


def test_the_trace_holds_the_last_steps_whole(finished):
    trace = find(finished).trace
    assert sorted({record.step for record in trace}) == list(range(8 - KEPT_STEPS, 8))
    by_step = {step: [str(r.action) for r in trace if r.step == step] for step in range(4, 8)}
    kinds = {re.sub(r"\d+$", "", action.split(".")[0][1:]) for action in by_step[7]}
    assert kinds == {"F", "B", "DOWN", "NORM", "CLIP", "U", "UP"}
    assert all(sorted(actions) == sorted(by_step[7]) for actions in by_step.values())
    starts = [start for _, start, _ in step_spans(trace)]
    assert starts == sorted(starts) and starts[0] == 0
    assert (finished / "trace.json").stat().st_size < 60 * len(trace) + 500


def test_every_checkpoint_brings_the_trace_up_to_date(write_run, processes, tmp_path):
    path = write_run(checkpoint__every=3)
    output, arguments = tmp_path / "printed", ["train", path]
    code, *_ = cli_process.execute(processes, output, arguments, [("backward", 6)])  # Ctrl-C in step 4
    assert code == 130
    assert max(record.step for record in find(evidence.home(path)).trace) == 3
    train(path)
    assert sorted({record.step for record in find(evidence.home(path)).trace}) == [4, 5, 6, 7]


def test_a_run_that_goes_on_shows_what_there_is(write_run, processes, tmp_path):
    path = write_run(checkpoint__every=3)
    cli_process.execute(processes, tmp_path / "printed", ["train", path], [("backward", 6)])
    found = find(evidence.home(path))
    assert found.measured is None and found.predicted.peaks["ram"]["states"] > 0
    peaks = {bar.label: bar.measured for bar in memory_bars(found) if bar.measured}
    assert peaks == {"ram peak": found.metrics[-1]["held"]["ram"]}
    assert describe(found)[1].startswith("step 4: loss ")


def test_a_resumed_run_shows_the_steps_of_all_sessions(write_run, processes, tmp_path):
    path = write_run(checkpoint__every=3)
    cli_process.execute(processes, tmp_path / "printed", ["train", path], [("backward", 6)])
    train(path)
    found = find(evidence.home(path))
    assert [record["step"] for record in found.metrics] == list(range(1, 9))
    assert found.measured is not None and found.measured.steps == 8


def test_a_directory_without_a_step_says_so(write_run, finished):
    (finished / "metrics.jsonl").unlink()
    assert "no step yet" in describe(find(finished))


def test_damage_is_named(finished):
    (finished / "ledger.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"ledger\.json is damaged"):
        find(finished)


def test_the_chrome_trace_is_json_with_a_track_a_lane(finished, tmp_path):
    out = tmp_path / "new" / "trace.json"
    write_chrome_trace(find(finished), out)
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == ["steps", "compute", "d2h", "cpu", "h2d"]
    assert {event["name"] for event in events if event.get("tid") == 0 and event["ph"] == "X"} == {
        "step 5", "step 6", "step 7", "step 8"
    }  # fmt: skip


def test_a_run_without_a_trace_is_told_when_there_is_one(finished, tmp_path):
    (finished / "trace.json").unlink()
    with pytest.raises(UserError, match="has no trace yet: the first checkpoint writes it"):
        write_chrome_trace(find(finished), tmp_path / "out.json")


def test_the_command_prints_draws_and_writes(finished, processes, tmp_path):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "run.png", tmp_path / "run.json"
    arguments = ["show", finished, "--picture", picture, "--trace", trace]
    code, printed, errors = cli_process.execute(processes, tmp_path / "printed", arguments)
    assert (code, errors) == (0, "")
    assert printed.splitlines()[0].startswith(f"{finished}: ")
    assert re.search(r"^ram peak +[\d.]+ [MG]iB +[\d.]+ ", printed, re.MULTILINE)
    assert printed.endswith(f"Drawn  {picture}\nTrace  {trace}: open it at https://ui.perfetto.dev\n")
    assert picture.read_bytes().startswith(b"\x89PNG") and json.loads(trace.read_text("utf-8"))


def test_training_is_the_same_bit_for_bit_whatever_is_recorded(write_run, monkeypatch):
    from headrace.lanes import trace

    monkeypatch.setattr(trace.Trace, "add", lambda self, record: None)
    without = write_run("without")
    train(without)
    monkeypatch.undo()
    recorded = write_run("recorded")
    train(recorded)
    assert evidence.all_of(without) == evidence.all_of(recorded)
    assert len(read_metrics(evidence.home(recorded) / "metrics.jsonl")) == 8
