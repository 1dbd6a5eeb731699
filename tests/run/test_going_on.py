"""Runs that go on: what may change, what is exported meanwhile, what their last table says."""

import json

import evidence
import pytest
import yaml
from transformers import LlamaConfig

from headrace.checkpoint.manifest import Environment
from headrace.ledger import Ledger
from headrace.run import export as exporting
from headrace.run.export import export
from headrace.run.train import train

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def larger(tiny, tmp_path):
    """A model of several buckets and of several chunks of the kernel; its weights are drawn at random."""
    directory = tmp_path / "larger"
    directory.mkdir()
    for path in (tiny / "model").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    LlamaConfig.from_pretrained(tiny / "model", **SIZES).save_pretrained(directory)
    return str(directory / "config.json")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_buckets_and_the_threads_of_the_update_may_change_and_change_no_bit(
    write_run, larger, recwarn, dtype
):
    values = {"model__path": larger, "model__dtype": dtype, "update__bucket": 2**16, "threads__update": 1}
    values |= {"data__eval": None, "optim__schedule": "constant"}
    whole, changed = write_run("whole", **values), write_run("changed", **values)
    train(whole)
    train(changed, ["train.steps=4"])
    train(changed, ["update.bucket=262144", "threads.update=3"])
    assert evidence.all_of(changed) == evidence.all_of(whole)
    assert evidence.steps(changed) == [6, 8]
    assert not [str(warning.message) for warning in recwarn if "headrace" in warning.filename]


def test_the_environment_of_a_checkpoint_holds_the_threads_that_bits_depend_on(write_run):
    path = write_run()
    train(path)
    manifest = json.loads((evidence.checkpoint(path) / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["environment"]["threads"] == {"compute": 1}
    assert Environment(**manifest["environment"]).differences(Environment.here({"compute": 1})) == []


def test_an_export_beside_a_run_that_removes_the_checkpoint_takes_the_newer_one(
    write_run, tmp_path, monkeypatch
):
    path = write_run(checkpoint__keep=1)
    train(path)
    load_model, calls = exporting.load_model, []

    def load_while_the_run_goes_on(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            train(path, ["train.steps=10"])
        return load_model(*arguments, **options)

    monkeypatch.setattr(exporting, "load_model", load_while_the_run_goes_on)
    _, step = export(evidence.home(path), tmp_path / "exported")
    assert (step, len(calls)) == (10, 2)
    written = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert written == (evidence.home(path) / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("batch", "micro_batch"), [(4, 2), (16, 4), (16, 16), (64, 2), (1000, 2), (1000, 1000), (2**20, 1)]
)
def test_what_moves_is_foretold_exactly_for_steps_that_are_not_full(write_run, capsys, batch, micro_batch):
    """The last step of an epoch is smaller, and every step where the data is less than a batch."""
    path = write_run(train__batch=batch, train__micro_batch=micro_batch, train__steps=5)
    train(path)
    (down,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("down a step"))
    assert down.endswith("0.0 %  ok")
    both = json.loads((evidence.home(path) / "ledger.json").read_text(encoding="utf-8"))
    predicted, measured = (Ledger.from_json(both[name]) for name in ("predicted", "measured"))
    for lane in ("d2h", "h2d"):
        assert predicted.lane_bytes(lane) == round(measured.lane_bytes(lane) / measured.steps)


def test_nothing_is_left_of_a_run_whose_data_is_refused(write_run, tmp_path):
    (tmp_path / "broken.jsonl").write_text("{", encoding="utf-8")
    path = write_run()
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tree["out"] = str(tmp_path / "new" / "run")
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    for file in ("broken.jsonl", "nowhere.jsonl"):
        with pytest.raises(ValueError, match=file):
            train(path, [f"data.train={tmp_path / file}"])
        assert not (tmp_path / "new").exists()
