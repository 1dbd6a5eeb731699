"""The plan that the README shows is the one that the program prints, and a reader can type what it says."""

import json
import re
from pathlib import Path

import yaml

from headrace.run.file import validate
from headrace.run.plan import plan

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


def test_the_shown_plan_is_that_of_the_shown_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_file = re.search(r"^```yaml\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    shown = re.search(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    machine = re.search(r"`--machine ([\w-]+)`", README)[1]
    threads = {"compute": 2, "update": 2}  # auto asks this machine, and each has a little memory of its own
    run = validate({**yaml.safe_load(run_file), "threads": threads}, "README.md")
    model = tmp_path / run.model.path
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN3_1_7B))
    assert plan(run, machine=machine).text().splitlines() == shown.splitlines()


def test_the_environment_is_entered_before_its_first_command():
    assert (
        README.index("source .venv/bin/activate")
        < re.search(r"^(headrace|python) ", README, re.MULTILINE).start()
    )
