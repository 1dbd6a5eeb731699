"""checkpoint.states=false: checkpoints are models that load, and it is said that no run resumes from them."""

import signal

import deadly
import evidence
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace
from headrace.checkpoint.restore import open_checkpoint
from headrace.errors import UserError
from headrace.run.export import export
from headrace.run.plan import plan

SENTENCE = "checkpoint.states=false: checkpoints hold weights only, so this run cannot resume"


@pytest.fixture
def path(write_run):
    return write_run(checkpoint__states=False)


def test_a_checkpoint_is_a_model_and_the_same_as_with_states(path, write_run, tmp_path, capsys):
    headrace.train(path)
    assert f"! {SENTENCE}" in capsys.readouterr().out
    assert evidence.steps(path) == [6, 8]
    stored = evidence.checkpoint(path, 6)
    assert not any((stored / f"{table}.safetensors").exists() for table in ("master", "exp_avg"))
    assert AutoTokenizer.from_pretrained(stored)("water").input_ids
    whole = write_run("whole")
    headrace.train(whole)
    assert evidence.weights(path) == evidence.weights(whole)
    assert "cannot resume" not in capsys.readouterr().out
    found = AutoModelForCausalLM.from_pretrained(stored, dtype="auto").state_dict()
    master = evidence.table(whole, "master", 6)
    assert master.keys() <= found.keys()
    for name, tensor in master.items():
        assert torch.equal(found[name], tensor.bfloat16()), name


def test_the_plan_says_it(path):
    assert f"! {SENTENCE}" in plan(path).text()


def test_a_second_start_is_answered_in_one_sentence(path, write_run, processes, tmp_path, capsys):
    process = processes.Process(target=deadly.run, args=(path, (), "update", 5))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(UserError) as refusal:
        headrace.train(path)
    text = str(refusal.value)
    assert "checkpoint-4 holds weights only (checkpoint.states=false)" in text and "\n" not in text
    headrace.train(write_run("further", model__path=str(evidence.checkpoint(path, 4))))
    with pytest.raises(UserError, match=r"holds weights only .* copy it"):
        export(evidence.home(path), tmp_path / "out")
    headrace.train(path, ["checkpoint.resume=never"])
    assert "checkpoint-4 is set aside as checkpoint-4.set-aside" in capsys.readouterr().out


def test_a_finished_run_stays_finished(path, capsys):
    model = headrace.train(path)
    capsys.readouterr()
    assert headrace.train(path) == model
    assert "already finished: 8 steps done" in capsys.readouterr().out


def test_damage_is_found(path):
    headrace.train(path)
    stored = evidence.checkpoint(path, 6)
    (stored / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json has 2 bytes instead of"):
        open_checkpoint(stored)
