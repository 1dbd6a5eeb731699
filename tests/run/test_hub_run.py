"""Runs on a model and data of the hub's local cache: planned, resumed exactly, never on another commit."""

import json
import os
import shutil
import subprocess
import sys

import evidence
import pytest
import torch
import yaml
from hub_cache import HubCache, files_of
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.models.sample import answer
from headrace.run.plan import plan
from headrace.run.samples import look
from headrace.run.train import train

CONSTANT = {"optim__schedule": "constant", "data__eval": None}  # so that a run's length changes nothing
HUB = {"model__path": "mill/wheel", "data__train": "mill/chats", **CONSTANT}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return HubCache(tmp_path / "hub", monkeypatch)


@pytest.fixture
def model(tiny, tmp_path):
    """A whole model in a directory."""
    directory = tmp_path / "directory"
    shutil.copytree(tiny / "model", directory)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def fill(cache, tiny, model):
    chats = (tiny / "chats.jsonl").read_bytes()
    cache.add("dataset", "mill/chats", {"data/train.jsonl": chats, "README.md": b""})
    return cache.add("model", "mill/wheel", files_of(model))


def refusal(act, *arguments):
    with pytest.raises(UserError) as caught:
        act(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_resumed_run_has_the_bits_of_one_on_the_same_files(cache, tiny, model, write_run):
    snapshot = fill(cache, tiny, model)
    hub, local = write_run("hub", **HUB), write_run("local", model__path=str(model), **CONSTANT)
    train(hub, ["train.steps=4"])
    train(hub)
    train(local)
    assert evidence.all_of(hub) == evidence.all_of(local)
    saved = yaml.safe_load((evidence.home(hub) / "plan.yaml").read_text())
    assert saved["model"]["path"] == f"mill/wheel@{snapshot.name}"


def test_a_run_may_be_called_as_the_organisation_of_its_model_is(cache, tiny, model, write_run):
    fill(cache, tiny, model)
    path = write_run(**HUB, out="mill")
    train(path, ["train.steps=2"])
    train(path, ["train.steps=4"])
    assert evidence.steps(path)[-1] == 4


def test_another_commit_of_the_model_is_noticed(cache, tiny, model, write_run):
    old = fill(cache, tiny, model)
    path, straight = write_run("run", **HUB), write_run("straight", **HUB)
    train(straight)
    train(path, ["train.steps=4"])
    changed = {**files_of(model), "README.md": b"another commit"}
    new = cache.add("model", "mill/wheel", changed)
    sentence = refusal(train, path)
    assert f"model.path: mill/wheel@{old.name} -> mill/wheel@{new.name}" in sentence
    train(path, [f"model.path=mill/wheel@{old.name}"])
    assert evidence.all_of(path) == evidence.all_of(straight)


def test_other_data_is_noticed_and_another_commit_of_the_same_is_not(cache, tiny, model, write_run):
    fill(cache, tiny, model)
    path, straight = write_run("run", **HUB), write_run("straight", **HUB)
    train(straight)
    train(path, ["train.steps=4"])
    chats = (tiny / "chats.jsonl").read_bytes()
    cache.add("dataset", "mill/chats", {"train.jsonl": b"".join(chats.splitlines(True)[:-1])})
    assert "the data is not what" in refusal(train, path)
    cache.add("dataset", "mill/chats", {"train.jsonl": chats})
    train(path)
    assert evidence.all_of(path) == evidence.all_of(straight)


def test_an_adapter_names_its_base_as_peft_does(cache, tiny, model, write_run):
    pytest.importorskip("peft")
    snapshot = fill(cache, tiny, model)
    path = write_run("lora", **HUB, model__lora={"rank": 4})
    directory = train(path)
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("mill/wheel", snapshot.name)
    here = answer(str(directory), "water", tokens=4)
    cache.add("model", "mill/wheel", {**files_of(model), "model.safetensors": b"newer"})
    assert answer(str(directory), "water", tokens=4) == here, "of the commit beside which it was trained"


def test_a_configuration_in_the_cache_is_enough_to_plan(cache, tiny, write_run, capsys, monkeypatch):
    snapshot = cache.add(
        "model", "mill/wheel", {"config.json": (tiny / "model" / "config.json").read_bytes()}
    )
    path = write_run(**{**HUB, "data__train": str(tiny / "chats.jsonl")})
    assert plan(path).verdict.fits
    monkeypatch.setattr("sys.argv", ["headrace", "plan", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and "wheel at " in capsys.readouterr().out.splitlines()[0]
    sentence = refusal(train, path)
    assert f"no weights: hf download mill/wheel --revision {snapshot.name} fetches them" in sentence


@pytest.mark.parametrize("act", [train, look])
def test_a_tokenizer_that_was_not_fetched_is_asked_for(cache, tiny, model, write_run, act):
    fill(cache, tiny, model)
    weights = files_of(model, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    cache.add("model", "mill/wheel", weights)
    sentence = refusal(act, write_run(**HUB))
    assert "mill/wheel" in sentence and "has no tokenizer beside it: hf download mill/wheel" in sentence


def test_the_commit_is_printed(cache, tiny, model, write_run, capsys):
    snapshot = fill(cache, tiny, model)
    path = write_run(**HUB)
    assert plan(path).text().startswith(f"mill/wheel at {snapshot.name[:7]}, ")
    for steps in (2, 4):
        train(path, [f"train.steps={steps}"])
        assert f"\nmodel: mill/wheel@{snapshot.name} of the hub's cache\n" in capsys.readouterr().out


def test_its_rows_can_be_looked_at(cache, tiny, model, write_run):
    fill(cache, tiny, model)
    hub, local = write_run("hub", **HUB), write_run("local", model__path=str(model), **CONSTANT)
    assert look(hub) == look(local)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_is_where_the_environment_says(tiny, model, write_run, tmp_path, monkeypatch, variable):
    with monkeypatch.context() as patch:
        fill(HubCache(tmp_path / "home" / "hub", patch), tiny, model)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
    place = tmp_path / "home" if variable == "HF_HOME" else tmp_path / "home" / "hub"
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan", write_run(**HUB)],
        env={**own, variable: str(place)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "") and "wheel at " in done.stdout


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"model__path": "mill/pond"}, ["model.path=mill/pond", "hf download mill/pond fetches it"]),
        (
            {"data__train": "mill/pond"},
            ["data.train: mill/pond", "hf download mill/pond --repo-type dataset fetches it"],
        ),
        ({"data__eval": "mill/chats"}, ["data.eval: mill/chats has no validation or test split"]),
        ({"model__path": "x" * 300 + "/y"}, ["model.path=xxx", "cannot be read (File name too long)"]),
        ({"data__train": "x" * 300 + "/y"}, ["data.train: xxx", "cannot be read (File name too long)"]),
        (
            {"out": "mill/wheel"},
            ["out=mill/wheel", "in the place of model.path=mill/wheel", "choose another out"],
        ),
        ({"out": "mill/wheel/first"}, ["out=mill/wheel/first", "in the place of model.path=mill/wheel"]),
    ],
)
def test_what_cannot_be_used_ends_with_code_2(
    cache, tiny, model, write_run, tmp_path, capsys, monkeypatch, values, needed
):
    fill(cache, tiny, model)
    monkeypatch.setattr("sys.argv", ["headrace", "train", str(write_run(**{**HUB, **values}))])
    with pytest.raises(SystemExit) as end:
        main()
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count("\n") == 1 and all(part in errors for part in needed)
    assert not (tmp_path / "mill").exists() and not (tmp_path / "run").exists()
