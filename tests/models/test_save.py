import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import FAMILIES, build, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headrace.errors import UserError
from headrace.memory.tensorfile import Entry
from headrace.models.attention import attach
from headrace.models.load import load_model
from headrace.models.save import model_entries, save_model, verify_model

IDS = torch.arange(18).view(2, 9)


def logits(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def save(model, directory, **options):
    return save_model(directory, model_entries(model), model.config, **options)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_loads_what_was_saved(tmp_path, family, tied):
    model = build(family, torch.bfloat16, tie_word_embeddings=tied)
    attach(model)
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    assert save(model, tmp_path / "one") == len(expected)
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    save(model, tmp_path / "many", max_shard_bytes=4000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 2
    for directory in (tmp_path / "one", tmp_path / "many"):
        again = AutoModelForCausalLM.from_pretrained(directory)
        assert again.dtype == torch.bfloat16
        assert torch.equal(logits(again), logits(model))
        assert "headrace" not in (directory / "config.json").read_text()
        attach(model)


def test_merged_experts_load_in_transformers(tmp_path):
    model = build("mixtral", torch.bfloat16, num_local_experts=3)
    save(model, tmp_path / "m")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")), logits(model))
    assert torch.equal(logits(load_model(tmp_path / "m").model), logits(model))


def test_entries_may_stream_from_fp32_pieces(tmp_path):
    model = build("llama")
    flat = {name: parameter.detach().reshape(-1) for name, parameter in model.named_parameters()}
    entries = [
        Entry(name, torch.bfloat16, tuple(parameter.shape), lambda name=name: flat[name].split(100))
        for name, parameter in model.named_parameters()
    ]
    save_model(tmp_path / "m", entries, model.config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(logits(again), logits(build("llama", torch.bfloat16)))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype != "bfloat16", "the caller's config is not touched"


def test_everything_comes_along_also_through_a_second_round(tmp_path):
    model, tokenizer = build("llama"), tiny_tokenizer()
    odd = GenerationConfig(do_sample=False, temperature=0.5)  # transformers would not save it
    save(model, tmp_path / "a", tokenizer=tokenizer, generation_config=odd)
    loaded = load_model(tmp_path / "a", torch.float32)
    save_model(
        tmp_path / "b",
        model_entries(loaded.model),
        loaded.model.config,
        loaded.tokenizer,
        loaded.model.generation_config,
    )
    again = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert again("a b c")["input_ids"] == tokenizer("a b c")["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "b").temperature == 0.5
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "b")), logits(model))
    a, b = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert a == b
    assert b["architectures"] == ["LlamaForCausalLM"]


def test_an_existing_directory_is_kept_unless_it_may_be_replaced(tmp_path):
    model, target = build("llama"), tmp_path / "m"
    target.mkdir()
    save(model, target)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"m exists already"):
        save(model, target)
    assert (target / "notes.txt").exists()
    save(model, target, overwrite=True)
    assert not (target / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists already"):
        save(model, tmp_path / "file", overwrite=True)


def test_a_full_disk_leaves_the_old_directory_and_nothing_beside_it(tmp_path):
    model, target = build("llama"), tmp_path / "m"
    save(model, target)
    before = (target / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError):
            save(model, target, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def flip_last_byte(file: Path):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_verifying_names_what_differs(tmp_path):
    model = build("llama", torch.bfloat16)
    save(model, tmp_path / "m", max_shard_bytes=4000)
    entries = model_entries(model)
    assert verify_model(tmp_path / "m", entries) == len(entries)
    with pytest.raises(OSError, match=entries[-1].name):
        verify_model(tmp_path / "m", entries[:-1])
    with pytest.raises(OSError, match=r"model\.norm\.weight was read back other"):
        verify_model(tmp_path / "m", [*entries[:-1], Entry.of(entries[-1].name, torch.zeros(3))])
    flip_last_byte(max((tmp_path / "m").glob("*.safetensors")))
    with pytest.raises(OSError, match="was read back other than it was written"):
        verify_model(tmp_path / "m", entries)


def test_a_model_that_lies_about_its_weights_is_never_put_in_place(tmp_path):
    model = build("llama")
    values = iter([torch.zeros(3), torch.ones(3)])
    fickle = Entry("x", torch.float32, (3,), lambda: [next(values)])
    with pytest.raises(OSError, match="x was read back"):
        save_model(tmp_path / "m", [fickle], model.config)
    assert not list(tmp_path.iterdir())
