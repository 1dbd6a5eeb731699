"""Models and data that cannot be used end every command with code 2 and one sentence, before any step."""

import json
import shutil

import cli_process
import evidence
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


@pytest.fixture
def model(tiny, tmp_path):
    """A whole model to spoil."""
    directory = tmp_path / "model"
    shutil.copytree(tiny / "model", directory)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def without_weights(model):
    (model / "model.safetensors").unlink()


def torn_tokenizer(model):
    (model / "tokenizer.json").write_text("{")


def raising_template(model):
    (model / "chat_template.jinja").write_text("{{ raise_exception('not today') }}")


def foreign_tokenizer(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["mill"] + [f"word{n}" for n in range(400)])
    tokenizer.eos_token = "word399"
    tokenizer.save_pretrained(model)


def unknown_rope(model):
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "foo"}
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config))


SPOILT = {
    without_weights: "no weights",
    torn_tokenizer: "tokenizer.json",
    raising_template: "not today",
    foreign_tokenizer: "vocab_size",
    unknown_rope: "configuration is not valid",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_spoilt_model(processes, write_run, model, tmp_path, spoil):
    spoil(model)
    path = write_run(model__path=str(model))
    for arguments in (["train", path], ["sample", model, "water mill"]):
        code, _, errors = cli_process.execute(processes, tmp_path / "output", arguments)
        sentences = [line for line in errors.splitlines() if line.startswith("headrace: ")]
        assert code == 2 and len(sentences) == 1 and SPOILT[spoil] in sentences[0], errors
        assert "Traceback" not in errors
    assert not (evidence.home(path) / "metrics.jsonl").exists()


RECORDS = {
    "number": ('{"messages": [], "n": ' + "9" * 5000 + "}", "a number of too many digits"),
    "tools": (
        json.dumps({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}),
        "'tool_calls' in message 1, which are not supported",
    ),
}


@pytest.mark.parametrize("flaw", RECORDS)
def test_a_flawed_record(processes, write_run, tiny, tmp_path, flaw):
    record, message = RECORDS[flaw]
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{(tiny / 'chats.jsonl').read_text()}{record}\n")
    path = write_run(data__train=str(data))
    code, _, errors = cli_process.execute(processes, tmp_path / "output", ["train", path])
    assert code == 2 and f"{data}:61 h" in errors and message in errors and "Traceback" not in errors


def test_a_file_that_is_named_twice(processes, write_run, tiny, tmp_path):
    path = write_run(data__train=[str(tiny / "chats.jsonl")] * 2)
    code, _, errors = cli_process.execute(processes, tmp_path / "output", ["train", path])
    assert code == 2 and "would count twice" in errors and "Traceback" not in errors
