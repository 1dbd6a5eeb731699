import json

import pytest

from headrace.errors import UserError
from headrace.models.config import ModelConfig
from headrace.models.source import INDEX, find_source, read_config

LLAMA = {"model_type": "llama", "hidden_size": 32}


def write(directory, config=LLAMA, files=()):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in files:
        (directory / name).touch()
    return directory


def test_the_three_kinds(tmp_path):
    whole = write(tmp_path / "whole", files=["model.safetensors", "tokenizer.json"])
    bare = write(tmp_path / "bare")
    (tmp_path / "m.gguf").touch()
    assert find_source(whole).kind == "directory"
    assert find_source(whole).weights == (whole / "model.safetensors",)
    assert find_source(str(whole / "config.json")).kind == "config", "a config.json alone means from scratch"
    assert (find_source(bare).kind, find_source(bare).weights) == ("directory", ()), "enough to plan with"
    assert find_source(bare).directory == find_source(bare / "config.json").directory == bare
    assert find_source(tmp_path / "m.gguf").kind == "gguf"
    assert read_config(whole) == read_config(bare) == read_config(bare / "config.json") == LLAMA


def test_shards_come_from_the_index(tmp_path):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    directory = write(tmp_path / "m", files=shards)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": shards[1], "b": shards[0]}}))
    assert find_source(directory).weights == tuple(directory / name for name in shards)
    (directory / shards[1]).unlink()
    with pytest.raises(UserError, match=f"lacks 1 of the 2 files .* first {shards[1]}"):
        find_source(directory)


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for path, message in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "notes.txt", "neither a .gguf file nor a config.json"),
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B"),
    ):
        with pytest.raises(UserError, match=message):
            find_source(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.safetensors", "x.gguf"])
def test_weights_that_are_not_read_are_never_taken_for_a_bare_config(tmp_path, name):
    with pytest.raises(UserError, match=f"has {name} but neither"):
        find_source(write(tmp_path / "m", files=[name]))


def test_quantised_and_remote_code_models_are_refused_in_one_sentence(tmp_path):
    quantised = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(UserError, match=r"quantised \(gptq\)"):
        read_config(write(tmp_path / "q", quantised))
    remote = {"model_type": "wonder", "auto_map": {"AutoModelForCausalLM": "modeling_wonder.Wonder"}}
    with pytest.raises(UserError, match="wonder needs code from its own repository"):
        read_config(write(tmp_path / "r", remote))
    built_in = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_llama.Llama"}}
    assert read_config(write(tmp_path / "b", built_in)) == built_in


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"hidden_size": 3}', b"\xff"])
def test_a_broken_config_is_named(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"config\.json"):
        read_config(file)


def test_a_broken_gguf_is_named(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF?")
    with pytest.raises(UserError, match=r"x\.gguf cannot be read"):
        read_config(tmp_path / "x.gguf")


def test_the_component_config():
    assert ModelConfig(path="x").dtype == "bf16"
    with pytest.raises(ValueError, match="dtype"):
        ModelConfig(path="x", dtype="fp16")
