"""Whole runs whose gradients wait on the disk: bits of runs in memory, resumption, figures as predicted."""

import json
import signal
from pathlib import Path

import evidence
import pytest
from test_disk_run import check_kills, execute, larger, on_disk
from test_streamed_run import bytes_of_lanes, ledgers

from headrace.errors import UserError
from headrace.run.plan import plan
from headrace.run.train import train

__all__ = ["larger"]


def waiting(tmp_path, *names, window=1, **memory):
    return on_disk(tmp_path, *names, window=window, **{"gradients": "disk", **memory})


@pytest.mark.parametrize(
    ("micro_batch", "batch", "memory"),
    [
        (4, 4, {}),
        (2, 4, {}),
        (1, 3, {}),
        (2, 4, {"states": "host"}),
        (2, 4, {"weights": "disk", "activations": "disk"}),
    ],
)
def test_a_run_is_that_in_memory_and_its_bytes_are_those_predicted(
    write_run, larger, tmp_path, micro_batch, batch, memory
):
    """Over an epoch whose last step is short, and a step more."""
    values = {"model__path": larger, "train__micro_batch": micro_batch, "train__batch": batch}
    values |= {"data__packing": False, "data__eval": 0.52, "train__steps": 11, "train__eval_every": 9}
    in_memory = write_run("memory", **values)
    disk = write_run("disk", **values, **waiting(tmp_path, "a", "b", window=5, **memory))
    train(in_memory)
    train(disk)
    assert evidence.weights(disk) == evidence.weights(in_memory)
    assert evidence.metrics(disk) == evidence.metrics(in_memory)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists(), "files are left"
    predicted, measured = ledgers(disk)
    steps = measured["steps"]
    ours, theirs = bytes_of_lanes(measured, 1), bytes_of_lanes(predicted, steps)
    assert ours.keys() == theirs.keys()
    for lane in ours if "activations" not in memory else ():  # rows are shorter than the context
        assert abs(ours[lane] - theirs[lane]) <= steps * 4, (lane, ours[lane], theirs[lane])
    assert "gradients" in measured["peaks"]["disk"]
    for tier, purpose in (("ram", "states"), ("ram", "buffers"), ("disk", "states"), ("disk", "gradients")):
        assert measured["peaks"][tier].get(purpose) == predicted["peaks"][tier].get(purpose)
    assert measured["peaks"]["ram"]["gradients"] <= predicted["peaks"]["ram"]["gradients"]


@pytest.mark.parametrize("occurrence", [0, 100])
def test_a_run_killed_as_it_writes_gradients_goes_on_exactly(
    processes, write_run, tmp_path, larger, occurrence
):
    whole = write_run("whole", model__path=larger)
    killed = write_run("killed", model__path=larger, **waiting(tmp_path, "a", "b"))
    assert execute(processes, whole) == 0
    assert execute(processes, killed, (), "gradients", occurrence) == -signal.SIGKILL
    assert [*tmp_path.glob("[ab]/headrace-r0-gradients-*")]
    assert execute(processes, killed) == 0
    assert evidence.weights(killed) == evidence.weights(whole)
    assert evidence.metrics(killed) == evidence.metrics(whole)
    assert not [*tmp_path.glob("[ab]/headrace-*")], "files are left"


@pytest.mark.slow
def test_many_kills(processes, write_run, tmp_path, larger):
    died = check_kills(processes, write_run, tmp_path, larger, 9, rounds=4, kills=4, gradients="disk")
    print(f"{died} SIGKILLs, 4 runs, all equal bit for bit")
    assert died >= 8


def test_checkpoints_hold_no_gradients(write_run, larger, tmp_path):
    disk = write_run("disk", model__path=larger, **waiting(tmp_path, "a"))
    train(disk)
    files = [file.name for file in evidence.checkpoint(disk).iterdir()]
    assert any("states-b" in name for name in files)
    assert not any("gradients" in name for name in files)


def test_gradients_move_between_memory_and_disk_when_a_run_goes_on(write_run, larger, tmp_path):
    whole, moved = write_run("whole", model__path=larger), write_run("moved", model__path=larger)
    constant = ["optim.schedule=constant"]
    train(whole, constant)
    disk = ["memory.states=disk", f"memory.disk=[{{path: {tmp_path / 'a'}}}]", "update.bucket=65536"]
    train(moved, [*constant, *disk, "memory.gradients=disk", "train.steps=3"])
    train(moved, [*constant, *disk, "memory.gradients=host", "train.steps=5"])
    train(moved, [*constant, *disk, "memory.gradients=disk"])
    assert evidence.weights(moved) == evidence.weights(whole)


def test_auto_is_memory_while_they_fit_there_and_then_the_disk(write_run, larger, tmp_path):
    path = write_run("run", model__path=larger, **on_disk(tmp_path, "a", window=1))
    need = {
        where: plan(path, [f"memory.gradients={where}"]).predicted.total("ram") for where in ("host", "disk")
    }
    assert need["disk"] < need["host"]
    for host, where in ((need["host"], "host"), (need["host"] - 1, "disk"), (need["disk"], "disk")):
        planned = plan(path, [f"memory.host={host}"])
        assert planned.verdict.fits and planned.run.memory.gradients == where
    short = plan(path, [f"memory.host={need['disk'] - 1}"])
    assert not short.verdict.fits and short.run.memory.gradients == "disk"
    refused = plan(path, [f"memory.host={need['host'] - 1}", "memory.gradients=host"]).verdict
    assert not refused.fits and "memory.gradients=disk" in str(refused)


def test_auto_prefers_a_smaller_micro_batch_in_memory_to_the_disk(write_run, larger, tmp_path):
    path = write_run("run", model__path=larger, **on_disk(tmp_path, "a"), train__micro_batch="auto")
    rows = {n: plan(path, [f"train.micro_batch={n}"]).predicted.total("ram") for n in (1, 2, 4)}
    planned = plan(path, [f"memory.host={min(rows.values())}"])
    assert planned.verdict.fits and planned.run.memory.gradients == "host"
    assert rows[planned.run.train.micro_batch] == min(rows.values())


def test_gradients_leave_memory_before_weights_do(write_run, larger, tmp_path):
    """Weights move twice in every micro-batch, gradients once."""
    config = json.loads(Path(larger).read_text()) | {"num_hidden_layers": 8}
    Path(larger).write_text(json.dumps(config))
    path = write_run("run", model__path=larger, **on_disk(tmp_path, "a", weights="auto"))
    need = plan(path, ["memory.weights=device", "memory.gradients=disk"]).predicted.total("ram")
    planned = plan(path, [f"memory.host={need}"]).run.memory
    assert (planned.weights, planned.gradients) == ("device", "disk")
    planned = plan(path, [f"memory.host={need - 1}"]).run.memory
    assert (planned.weights, planned.gradients) == ("disk", "disk")


def test_the_window_takes_the_room_that_gradients_leave(write_run, larger, tmp_path):
    path = write_run("run", model__path=larger, **on_disk(tmp_path, "a", window="auto"))
    place = 12 * 2**16
    with_one = plan(path, ["update.window=1", "memory.gradients=disk"]).predicted.total("ram")
    for more in range(3):
        planned = plan(path, ["memory.gradients=disk", f"memory.host={with_one + more * place}"])
        assert planned.run.update.window == 1 + more
        assert planned.verdict.fits


def test_the_plan_shows_where_gradients_wait(write_run, larger, tmp_path):
    path = write_run("run", model__path=larger, **waiting(tmp_path, "a"))
    planned = plan(path)
    row = next(line for line in planned.text().splitlines() if line.startswith("gradients"))
    assert len(row.split()) == 5, "gradients (fp32 sums), RAM, disk"
    saved = tmp_path / "plan.yaml"
    saved.write_text(planned.yaml())
    assert json.dumps(plan(saved).predicted.to_json()) == json.dumps(planned.predicted.to_json())


def test_what_cannot_work_is_refused_at_once(write_run, larger, tmp_path):
    with pytest.raises(UserError, match=r"memory\.gradients=disk needs a place: set memory\.disk"):
        plan(write_run(), ["memory.gradients=disk"])
    with pytest.raises(UserError, match=r"memory\.gradients=ram .*host.*disk.*auto"):
        plan(write_run(), ["memory.gradients=ram"])
    values = waiting(tmp_path, "a")
    without = plan(write_run("one", model__path=larger, **on_disk(tmp_path, "a"))).predicted.total("disk")
    values["memory"]["disk"][0]["size"] = without
    small = write_run("small", model__path=larger, **values)
    with pytest.raises(UserError, match=r"DOES NOT FIT: disk needs .*memory\.disk"):
        train(small)
