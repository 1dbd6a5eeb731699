"""Whatever is wrong with a model's directory is refused in one sentence that names the place."""

import json
import os
import re
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SMALL, build, tiny_tokenizer
from tokenizers import AddedToken

from headrace.errors import UserError
from headrace.models.load import load_model, load_tokenizer
from headrace.models.sample import answer
from headrace.models.source import INDEX, find_source, read_config


@pytest.fixture
def whole(tmp_path):
    """A directory in which nothing is wrong."""
    directory = tmp_path / "model"
    build("llama").save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refusal(act, *arguments, **options):
    """The sentence with which a user's mistake is refused."""
    with pytest.raises(UserError) as caught:
        act(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_the_whole_one_loads_and_speaks(whole):
    assert load_model(whole).tokenizer is not None
    answer(str(whole), "a b", tokens=1)


BROKEN = {
    "empty": b"",
    "torn": b"{",
    "list": b"[]",
    "null": b"null",
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 10_000,
    "number": b"9" * 5000,
}
FILES = (
    *("config.json", "generation_config.json", "model.safetensors", INDEX),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named(whole, name, content):
    (whole / name).write_bytes(BROKEN[content])
    assert str(whole / name) in refusal(load_model, whole)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
)
def test_a_file_that_may_not_be_read_is_named(whole, name):
    load_model(whole)  # imports what it needs, as another user cannot
    with as_nobody(whole):
        os.chmod(whole / name, 0)
        assert str(whole / name) in refusal(load_model, whole)


def test_a_directory_that_may_not_be_read_is_named(whole):
    with as_nobody(whole):
        os.chmod(whole, 0)
        for path in (whole, whole / "config.json", whole / "model.gguf"):
            assert f"model.path={path} cannot be read (Permission denied)" in refusal(find_source, path)


@contextmanager
def as_nobody(directory):
    """Give ``directory`` to a user without privileges and be that user, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        os.chmod(directory, 0o700)
        return
    nobody = 65534
    opened = [place for place in directory.parents if place.stat().st_mode & 0o005 != 0o005]
    modes = [place.stat().st_mode & 0o7777 for place in opened]
    for place in opened:
        place.chmod(0o755)
    for place in (directory, *directory.iterdir()):
        os.chown(place, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)
        for place, mode in zip(opened, modes, strict=True):
            place.chmod(mode)


@pytest.mark.parametrize("path", ["x" * 5000, "x" * 5000 + ".gguf", "~nobody-of-this-name/model"])
def test_a_path_that_cannot_be_is_refused(path):
    assert f"model.path={path[:200]} cannot be read" in refusal(find_source, path)


@pytest.mark.parametrize("act", [load_model, lambda path: answer(str(path), "a", tokens=1)])
def test_weights_that_were_not_fetched_are_asked_for_and_never_drawn(whole, act):
    (whole / "model.safetensors").unlink()
    sentence = refusal(act, whole)
    assert f"{whole} has a config.json but no weights" in sentence
    assert read_config(whole)["model_type"] == "llama", "enough to plan with"
    named = re.search(r"give (\S+) itself to train from scratch", sentence)[1]
    assert load_model(named).tokenizer is not None


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_one_quantised_tensor_is_enough_to_refuse(whole, dtype):
    tensors = load_file(whole / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    stored = str(dtype).removeprefix("torch.")
    assert f"{name} is stored as {stored}: the model is quantised" in refusal(load_model, whole)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_every_place_of_a_quantised_configuration_is_looked_at(whole, config):
    edit(whole / "config.json", **config)
    assert "config.json: the model is quantised (" in refusal(read_config, whole)


@pytest.mark.parametrize("scratch", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "foo"}},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": "x"},
        {"max_position_embeddings": "x"},
        {"pad_token_id": 99999},
        {"hidden_act": "foo"},
        {"hidden_size": 10**30},
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"rms_norm_eps": "x"},
        {"initializer_range": []},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_is_refused(whole, config, scratch):
    edit(whole / "config.json", **config)
    path = whole / "config.json" if scratch else whole
    assert f"{path}: its configuration is not valid (" in refusal(load_model, path)


def test_a_model_type_that_is_no_name_is_refused(whole):
    edit(whole / "config.json", model_type=["llama"])
    assert "config.json has no model_type" in refusal(read_config, whole)


@pytest.mark.parametrize(
    "settings",
    [{"eos_token": 5}, {"padding_side": "x"}, {"tokenizer_class": 3}, {"added_tokens_decoder": {"x": 1}}],
)
def test_a_tokenizer_with_strange_settings_is_refused(whole, settings):
    edit(whole / "tokenizer_config.json", **settings)
    assert f"{whole}: its tokenizer cannot be read (" in refusal(load_tokenizer, whole)


def test_code_of_a_tokenizer_is_never_run(whole):
    code = whole / "tokenization_wonder.py"
    code.write_text("raise SystemExit('it ran')")
    auto_map = {"AutoTokenizer": ["tokenization_wonder.Wonder", None]}
    edit(whole / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Wonder")
    sentence = refusal(load_tokenizer, whole)
    assert "needs code from its own repository (auto_map), which is never run" in sentence
    assert "trust_remote_code" not in sentence


def test_a_template_that_is_no_text_is_named(whole):
    (whole / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    assert f"{whole / 'chat_template.jinja'} cannot be read as UTF-8 text" in refusal(load_model, whole)


TEMPLATES = {
    "{% for %}": "Expected an expression",
    "{{ raise_exception('only in pairs') }}": "only in pairs",
    "{{ messages[5].content.x }}": "has no element 5",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% for i in range(10**12) %}x{% endfor %}": "Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_fails_ends_sampling_in_a_sentence(whole, template):
    (whole / "chat_template.jinja").write_text(template)
    sentence = refusal(answer, str(whole), "a b", tokens=1)
    assert "chat template cannot be used (" in sentence and TEMPLATES[template] in sentence


def test_a_vocabulary_larger_than_the_model_is_refused_at_load(whole):
    config = {**SMALL, "model_type": "llama", "vocab_size": 3}
    (whole / "config.json").write_text(json.dumps(config))
    sentence = refusal(load_model, whole / "config.json")
    assert "its tokenizer has the token 'c' of id 3, but the model only 3 rows (vocab_size)" in sentence
    edit(whole / "config.json", vocab_size=4)
    load_model(whole / "config.json")


@pytest.mark.parametrize("name", ["eos_token", "bos_token"])
def test_a_token_that_every_document_has_needs_a_row(whole, name):
    tokenizer = load_tokenizer(whole)
    tokenizer.add_tokens([AddedToken(f"<{n}>", special=True) for n in range(40)], special_tokens=True)
    setattr(tokenizer, name, "<39>")
    tokenizer.save_pretrained(whole)
    assert "has the token '<39>' of id 43, but the model only 40 rows" in refusal(load_model, whole)


def test_an_added_token_without_a_row_is_refused_only_where_it_is_used(whole):
    tokenizer = load_tokenizer(whole)
    tokenizer.add_tokens([AddedToken(f"<{n}>", special=True) for n in range(40)], special_tokens=True)
    tokenizer.save_pretrained(whole)
    answer(str(whole), "a <30>", tokens=1)
    sentence = refusal(answer, str(whole), "a <38>", tokens=1)
    assert "becomes the token '<38>' of id 42, but the model has only 40 rows" in sentence


@pytest.mark.parametrize(
    "settings", [{"num_beams": 0}, {"top_k": "x"}, {"eos_token_id": "x"}, {"forced_eos_token_id": 99999}]
)
def test_generation_settings_that_cannot_be_used_are_said(whole, settings):
    edit(whole / "generation_config.json", **settings)
    assert "as its generation_config.json says (" in refusal(answer, str(whole), "a b", tokens=2)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompt_and_answer_stay_within_the_positions_of_the_model(whole, family):
    build(family, vocab_size=4, max_position_embeddings=8).save_pretrained(whole)
    edit(whole / "generation_config.json", eos_token_id=None, forced_eos_token_id=None)
    (whole / "chat_template.jinja").unlink()
    answer(str(whole), "a b a b a", tokens=100)
    sentence = refusal(answer, str(whole), "a b a b a b a b", tokens=1)
    assert "the prompt has 8 tokens, which leaves no room in the 8 positions" in sentence


def test_a_prompt_that_is_no_text_is_refused(whole):
    assert "the prompt is not UTF-8 text" in refusal(answer, str(whole), "a \udcff", tokens=1)
