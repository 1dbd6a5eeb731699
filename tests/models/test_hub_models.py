"""Models by their name on the hub: found in its local cache, without the network, and read as directories."""

import json
import shutil

import pytest
import torch
from hub_cache import HubCache, files_of
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.errors import UserError
from headrace.models.load import load_model, load_tokenizer
from headrace.models.source import find_source, pinned, read_config

CONFIG = {"config.json": b'{"model_type": "llama", "hidden_size": 32}'}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return HubCache(tmp_path / "hub", monkeypatch)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A model with weights in shards."""
    directory = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(tiny / "model", directory)
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory))
    drawn.save_pretrained(directory, max_shard_size="40KB")
    return directory


def refusal(act, *arguments):
    with pytest.raises(UserError) as caught:
        act(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_name_is_the_snapshot_of_its_newest_commit(cache):
    old = cache.add("model", "mill/wheel", {**CONFIG, "model.safetensors": b"1"})
    new = cache.add("model", "mill/wheel", {**CONFIG, "model.safetensors": b"2"})
    source = find_source("mill/wheel")
    assert (source.kind, source.path, source.weights) == ("directory", new, (new / "model.safetensors",))
    assert read_config("mill/wheel") == json.loads(CONFIG["config.json"])
    assert pinned("mill/wheel") == f"mill/wheel@{new.name}" == pinned(f"mill/wheel@{new.name}")
    assert find_source(f"mill/wheel@{old.name}").path == old != new
    cache.add("model", "mill/wheel", {**CONFIG, "model.safetensors": b"3"}, revision="refs/pr/1")
    assert find_source("mill/wheel").path == new
    assert find_source("mill/wheel@refs/pr/1").path not in (old, new)


def test_what_is_there_wins_over_the_cache(cache, tmp_path):
    cache.add("model", "mill/wheel", CONFIG)
    for place in ("mill/wheel", "mill/wheel@main"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_bytes(CONFIG["config.json"])
        assert str(find_source(place).path) == place == pinned(place)


def test_links_load_as_files_do(cache, whole):
    cache.add("model", "mill/wheel", files_of(whole))
    ours, theirs = (load_model(path, torch.float32, "cpu") for path in ("mill/wheel", str(whole)))
    assert len(find_source("mill/wheel").weights) > 1
    expected = theirs.model.state_dict()
    assert ours.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in ours.model.state_dict().items())
    assert ours.tokenizer.get_vocab() == load_tokenizer(whole).get_vocab()


def test_a_configuration_alone_is_enough_to_plan_with(cache):
    cache.add("model", "mill/wheel", CONFIG)
    assert not find_source("mill/wheel").has_weights
    sentence = refusal(load_model, "mill/wheel", torch.float32, "cpu")
    assert "has a config.json but no weights: hf download mill/wheel fetches them" in sentence


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mill/wheel", "hf download mill/wheel fetches it"),
        ("mill/wheel@v2", "hf download mill/wheel --revision v2 fetches it"),
        ("models/qwen", "hf download models/qwen fetches it, or give a model directory"),
    ],
)
def test_what_is_not_in_the_cache_is_refused_with_the_command(cache, name, command):
    cache.add("dataset", "mill/wheel", CONFIG)
    sentence = refusal(find_source, name)
    assert sentence.startswith(f"model.path={name} is no path here, and the hub's cache ({cache.directory})")
    assert command in sentence


@pytest.mark.parametrize(
    "name", ["./wheel", "mill/wheel/deep", "mill--x/wheel", "mill/wheel.gguf", "-a/b", "wheel"]
)
def test_what_cannot_be_a_name_is_a_path(cache, name):
    assert f"model.path={name} " in refusal(find_source, name)


def test_half_a_download_is_refused_with_the_command(cache, whole):
    last = max(path.name for path in whole.glob("*.safetensors"))
    snapshot = cache.add("model", "mill/pond", files_of(whole, last))
    sentence = refusal(find_source, "mill/pond")
    assert f"{snapshot} lacks 1 of the" in sentence and f"first {last}; hf download mill/pond" in sentence


def test_snapshots_that_are_no_models(cache):
    snapshot = cache.add("model", "mill/gguf", {"q8.gguf": b"GGUF", "README.md": b""})
    assert f"give its {snapshot / 'q8.gguf'}" in refusal(find_source, "mill/gguf")
    cache.add("model", "mill/nothing", {"README.md": b""})
    assert "has no config.json, so it is no model" in refusal(find_source, "mill/nothing")
    cache.add("model", "mill/lora", {"adapter_config.json": b'{"base_model_name_or_path": "mill/wheel"}'})
    assert "holds an adapter, not a whole model: give model.path=mill/wheel" in refusal(
        find_source, "mill/lora"
    )
