"""Whole runs whose weights and layer inputs live on the disk: bits of runs in memory, bytes as predicted."""

import json
from pathlib import Path

import evidence
import pytest
from test_disk_run import check_kills, larger, on_disk

from headrace.errors import UserError
from headrace.run.export import export
from headrace.run.plan import plan
from headrace.run.train import train

__all__ = ["larger"]


def off_device(tmp_path, *names, **memory):
    return on_disk(tmp_path, *names, **{"weights": "disk", **memory})


def ledgers(run):
    both = json.loads((evidence.home(run) / "ledger.json").read_text())
    return both["predicted"], both["measured"]


def bytes_of_lanes(ledger, steps):
    found = {}
    for action, (_, nbytes, _) in ledger["actions"].items():
        kind = next(kind for kind in ("READ", "WRITE", "DOWN", "UP", "") if kind in action)
        if kind:
            key = kind + action.partition("@")[2]
            found[key] = found.get(key, 0) + nbytes * steps
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_by_rows_move_what_was_predicted(write_run, larger, tmp_path, tied):
    config = json.loads(Path(larger).read_text()) | {"tie_word_embeddings": tied, "vocab_size": 3000}
    Path(larger).write_text(json.dumps(config))
    run = write_run("rows", model__path=larger, **off_device(tmp_path, "a", "b", embeddings="rows"))
    train(run)
    predicted, measured = ledgers(run)
    steps = measured["steps"]
    ours, theirs = bytes_of_lanes(measured, 1), bytes_of_lanes(predicted, steps)
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[lane] - theirs[lane]) < steps * 4 for lane in ours), (ours, theirs)
    for tier in ("ram", "disk"):
        for purpose in measured["peaks"][tier].keys() - {"gradients", "activations", "logits"}:
            assert measured["peaks"][tier][purpose] == predicted["peaks"][tier][purpose], (tier, purpose)
    assert measured["peaks"]["ram"]["logits"] <= predicted["peaks"]["ram"]["logits"] * 1.1


@pytest.mark.parametrize("activations", ["recompute", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_is_that_in_memory(write_run, larger, tmp_path, activations, tied):
    config = json.loads(Path(larger).read_text()) | {"tie_word_embeddings": tied, "num_hidden_layers": 5}
    Path(larger).write_text(json.dumps(config))
    values = {"model__path": larger, "train__batch": 4, "train__micro_batch": 2, "train__eval_every": 2}
    values["data__eval"] = 0.2
    in_memory = write_run("memory", **values)
    streamed = write_run("streamed", **values, **off_device(tmp_path, "a", "b", activations=activations))
    train(in_memory)
    train(streamed)
    assert evidence.weights(streamed) == evidence.weights(in_memory)
    assert evidence.metrics(streamed) == evidence.metrics(in_memory)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists(), "files are left"
    predicted, measured = ledgers(streamed)
    steps = measured["steps"]
    ours, theirs = bytes_of_lanes(measured, 1), bytes_of_lanes(predicted, steps)
    assert ours.keys() == theirs.keys()
    for lane in ours.keys() - ({"DOWN"} if activations == "disk" else set()):
        assert abs(ours[lane] - theirs[lane]) < steps * 4, (lane, ours[lane], theirs[lane])
    for tier in ("ram", "disk"):
        for purpose in measured["peaks"][tier].keys() - {"gradients", "activations", "logits"}:
            assert measured["peaks"][tier][purpose] == predicted["peaks"][tier][purpose], (tier, purpose)
    assert measured["peaks"]["ram"]["activations"] <= predicted["peaks"]["ram"]["activations"] * 1.1


def test_kills(processes, write_run, tmp_path, larger):
    assert check_kills(processes, write_run, tmp_path, larger, 7, rounds=1, kills=3, weights="disk") >= 1


@pytest.mark.slow
def test_twenty_kills(processes, write_run, tmp_path, larger):
    values = {"weights": "disk", "activations": "disk"}
    died = check_kills(processes, write_run, tmp_path, larger, seed=8, rounds=6, kills=4, **values)
    print(f"{died} SIGKILLs, 6 runs, all equal bit for bit")
    assert died >= 12


def test_adapters_are_trained_beside_weights_on_the_disk(write_run, larger, tmp_path):
    lora = {"model__path": str(tmp_path / "base"), "model__lora": {"rank": 4}}
    first = write_run("first", model__path=larger)
    train(first, [f"out={tmp_path / 'run'}"])
    (tmp_path / "run" / "model").rename(tmp_path / "base")
    streamed = write_run("streamed", **lora)
    disk = f"memory.disk=[{{path: {tmp_path / 'a'}}}]"
    settings = ["memory.weights=disk", disk, "update.bucket=65536"]
    train(streamed, [*settings, "train.steps=2", "optim.schedule=constant"])
    again = write_run("again", **lora)
    train(again, ["train.steps=2", "optim.schedule=constant"])
    ours, theirs = (evidence.home(run) / "model/adapter_model.safetensors" for run in (streamed, again))
    assert ours.read_bytes() == theirs.read_bytes()


def test_export_of_a_checkpoint(write_run, larger, tmp_path):
    streamed = write_run("streamed", model__path=larger, **off_device(tmp_path, "a"))
    train(streamed)
    export(str(evidence.home(streamed)), tmp_path / "out")
    name = "model.safetensors"
    ours, theirs = (tmp_path / "out" / name), evidence.home(streamed) / "model" / name
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "override, message",
    [
        ("memory.weights=disk", r"memory\.weights=disk needs a place: set memory\.disk"),
        ("memory.activations=disk", r"memory\.activations=disk needs a place: set memory\.disk"),
        ("memory.weights=host", r"memory\.weights=host means nothing on .*no accelerator"),
        ("memory.activations=host", r"memory\.activations=host means nothing on .*no accelerator"),
        ("memory={weights: disk, activations: keep, disk: [{path: d}]}", r"needs layers that are recomputed"),
        ("memory.weights=ssd", r"memory\.weights=ssd"),
        ("memory.embeddings=rows", r"memory\.embeddings=rows has no effect with memory\.weights=device"),
    ],
)
def test_what_cannot_be_is_refused(write_run, larger, override, message):
    with pytest.raises(UserError, match=message):
        plan(write_run("wrong", model__path=larger), [override])


def test_compiled_layers_stay(write_run, larger, tmp_path):
    run = write_run("wrong", model__path=larger, **off_device(tmp_path, "a"))
    with pytest.raises(UserError, match=r"train\.compile=true and memory\.weights=disk do not go together"):
        plan(run, ["train.compile=true"])


def test_auto_takes_the_fastest_tier_that_fits(write_run, larger, tmp_path):
    config = json.loads(Path(larger).read_text()) | {"num_hidden_layers": 8}
    Path(larger).write_text(json.dumps(config))
    values = off_device(tmp_path, "a", weights="auto", gradients="host")
    run = write_run("auto", model__path=larger, **values)
    assert plan(run).run.memory.weights == "device"
    need = plan(run, ["memory.weights=disk"]).predicted.total("ram")
    assert need < plan(run, ["memory.weights=device"]).predicted.total("ram")
    planned = plan(run, [f"memory.host={need}", "update.window=1"])
    assert (planned.run.memory.weights, planned.verdict.fits) == ("disk", True)
