"""What goes wrong elsewhere, as told in public reports, on whole runs: memory, weights, gradients, steps."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import evidence
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.data.batch import IGNORED
from headrace.data.prepare import prepare
from headrace.errors import RunStopped, UserError
from headrace.memory.weights import DTYPES
from headrace.models.load import load_model, load_tokenizer
from headrace.optim.groups import decay_groups
from headrace.optim.offloaded import OffloadedAdamW
from headrace.run.file import read_run_file
from headrace.run.train import train
from headrace.training.forward import forward_loss
from headrace.training.loop import Loop
from headrace.training.lr import learning_rate
from headrace.training.meters import Meters

FP32 = {"model__dtype": "fp32"}


@pytest.fixture
def write_model(tiny, tmp_path):
    """Writes a copy of the tiny model with real weights, changed by a function of their names."""

    def write(name, change=lambda state: None, **config_values):
        path = tmp_path / name
        shutil.copytree(tiny / "model", path)
        config = AutoConfig.from_pretrained(path, **config_values)
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            change(model.state_dict())
        model.save_pretrained(path)
        return str(path)

    return write


@pytest.fixture
def one_strange_record(tiny, tmp_path):
    """Chats of which one alone has the character 7."""
    strange = {"messages": [{"role": "user", "content": "7"}, {"role": "assistant", "content": "mill pond"}]}
    path = tmp_path / "strange.jsonl"
    lines = (tiny / "chats.jsonl").read_text(encoding="utf-8")
    path.write_text(lines + json.dumps(strange) + "\n", encoding="utf-8")
    return str(path)


def token(model, text):
    """The number of a token in a model's vocabulary."""
    (number,) = load_tokenizer(model)(text)["input_ids"]
    return number


def train_plainly(path, directory):
    """What the run file asks for, in plain PyTorch with torch's fused AdamW; fp32. A step whose gradient is
    not finite is left out. Returns the weights by name.
    """
    run = read_run_file(path)
    loaded = load_model(run.model.path, DTYPES[run.model.dtype], seed=run.train.seed)
    rows = {"batch": run.train.batch, "micro_batch": run.train.micro_batch, "seed": run.train.seed}
    data = prepare(run.data, loaded.tokenizer, directory=directory, **rows).train
    model, optim = loaded.model.train(), run.optim
    groups = decay_groups(model, optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)
    torch.set_num_threads(run.threads.compute)
    for index in range(run.train.steps):
        batches = data.step(index)
        scale = 1.0 / sum(batch.valid_tokens for batch in batches)
        for batch in batches:
            forward_loss(model, batch, scale, run.train.loss_chunk).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(index, run.train.steps, optim)
        if clip([p for group in optimizer.param_groups for p in group["params"]], optim.max_grad_norm):
            optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def clip(parameters, limit):
    """Scale by the documented coefficient; every tensor here is one block of the norm. Returns finiteness."""
    squares = 0.0
    for p in parameters:
        values = p.grad.double().view(-1)
        squares += float(torch.dot(values, values))
    norm = math.sqrt(squares)
    if limit and norm > limit:
        for p in parameters:
            p.grad.mul_(limit / (norm + 1e-6))
    return math.isfinite(norm)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# -- memory ------------------------------------------------------------------------------------------------


def test_too_little_host_memory_is_refused_up_front_and_the_knob_it_names_helps(write_run):
    path = write_run(memory__host="64MiB")
    numbers = r"RAM needs \d+ MiB, \d+ MiB more than the 64 MiB of memory.host: set (memory.host=\d+[MG]iB)"
    with pytest.raises(UserError, match=numbers) as caught:
        train(path)
    assert not evidence.home(path).exists()
    train(path, [re.search(numbers, str(caught.value))[1]])
    assert evidence.steps(path) == [6, 8]


# -- weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.3, 0])
def test_a_run_has_the_bits_of_a_plain_loop(write_run, tmp_path, limit):
    """Accumulated, in rows of unequal lengths, with clipping and with 0, which means none."""
    path = write_run(**FP32, optim__max_grad_norm=limit, data__packing=False)
    train(path)
    assert_same(evidence.tensors(path), train_plainly(path, tmp_path / "data"))
    assert all(record["norm"] > 0.3 for record in evidence.metrics(path)), "clipping must matter"


def test_a_clip_limit_below_zero_is_refused(write_run):
    with pytest.raises(UserError, match=r"optim\.max_grad_norm=-1 in .*: it must be at least 0"):
        train(write_run(optim__max_grad_norm=-1))


def test_two_fresh_runs_are_bit_equal(write_run):
    one, two = write_run("one"), write_run("two")
    for path in (one, two):
        train(path)
    assert evidence.all_of(one) == evidence.all_of(two)
    assert [record["step"] for record in evidence.metrics(one)] == list(range(1, 9))


def test_master_weights_come_from_a_model_without_optimizer_state(write_run):
    """At a rate below every weight's last bit the master weights stay what they were at the start."""
    first = write_run("first")
    train(first)
    loaded = {name: tensor.float() for name, tensor in evidence.tensors(first).items()}
    model = {"model__path": str(evidence.home(first) / "model"), "train__steps": 1}
    for name, rate in (("still", 1e-30), ("moving", 1e-2)):
        path = write_run(name, **model, optim__lr=rate)
        train(path)
        assert evidence.state(path)["counts"] == dict.fromkeys(loaded, 1)
    assert_same(evidence.table(evidence.home(first).parent / "still", "master"), loaded)
    moved = evidence.table(evidence.home(first).parent / "moving", "master")
    assert not any(torch.equal(moved[name], loaded[name]) for name in loaded)


def test_small_steps_in_bf16_are_kept_in_the_master_weights(write_run):
    """At lr 5e-6 no step reaches half a bf16 unit of a weight of 1: bf16 alone would stand still for ever."""
    path = write_run(optim__lr=5e-6, optim__schedule="constant", optim__warmup=0, checkpoint__keep=9)
    start = load_model(read_run_file(path).model.path, torch.bfloat16).model.state_dict()
    train(path)
    norms = [name for name in start if name.endswith("norm.weight")]
    assert len(norms) == 5
    for name in norms:
        ways = [(evidence.table(path, "master", step)[name] - 1).abs() for step in (2, 4, 6, 8)]
        assert float(ways[-1].max()) > 20e-6, "nearly eight times the rate"
        assert [float(way.sum()) for way in ways] == sorted({float(way.sum()) for way in ways})
        assert torch.equal(evidence.tensors(path)[name], torch.ones_like(start[name]))
    masters, working = evidence.table(path, "master"), evidence.tensors(path)
    assert_same(working, {name: master.bfloat16() for name, master in masters.items()})


def test_tied_weights_stay_tied_through_save_load_and_resume(write_run):
    first = write_run("first")
    train(first)
    again = write_run("again", model__path=str(evidence.home(first) / "model"), checkpoint__keep=9)
    train(again)
    fresh = evidence.all_of(again)
    train(again, ["checkpoint.resume=4"])
    assert evidence.all_of(again) == fresh
    for path in (first, again):
        saved = evidence.tensors(path)
        assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved
        assert evidence.table(path, "master").keys() == saved.keys()
        model = AutoModelForCausalLM.from_pretrained(evidence.home(path) / "model", dtype=torch.bfloat16)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])


# -- accumulation ------------------------------------------------------------------------------------------


def test_accumulate_4_times_2_equals_8(write_run):
    """Unequal lengths, with clipping. The two differ only in the order in which fp32 sums are taken.

    An fp32 rounding is 6e-8. A gradient is a sum over all tokens, and its elements cancel: two orders of it
    are allowed 32 roundings of the largest element (10 were seen); the norm and the loss, in which they even
    out, 16 (1 was seen). A mean of the micro-batches' means, the usual mistake, is off by a hundredth.
    """
    runs = []
    for rows in (2, 8):
        values = {"train__batch": 8, "train__micro_batch": rows, "train__steps": 3, "checkpoint__keep": 9}
        runs.append(write_run(f"by{rows}", **FP32, **values, data__packing=False, checkpoint__every=1))
        train(runs[-1])
    many, one = (evidence.metrics(path) for path in runs)
    for key in ("norm", "loss"):
        assert [r[key] for r in many] == pytest.approx([r[key] for r in one], rel=1e-6, abs=0)
    assert [r["trained"] for r in many] == [r["trained"] for r in one]
    assert all(r["norm"] > 0.3 for r in many), "clipping must act"
    gradients = [evidence.table(path, "exp_avg", 1) for path in runs]
    for name, theirs in gradients[1].items():
        assert (gradients[0][name] - theirs).abs().max() <= 2e-6 * theirs.abs().max(), name


def masked(batch):
    return replace(batch, labels_BL=torch.full_like(batch.labels_BL, IGNORED), valid_tokens=0)


def train_on(path, directory, change):
    """The run's loop over its own steps, each changed; returns the weights and the reports."""
    run = read_run_file(path)
    loaded = load_model(run.model.path, torch.float32)
    rows = {"batch": run.train.batch, "micro_batch": run.train.micro_batch, "seed": 0}
    data = prepare(run.data, loaded.tokenizer, directory=directory, **rows).train
    count = len(change(data.step(0)))
    groups = decay_groups(loaded.model, 0.1)
    optimizer = OffloadedAdamW(groups, max_grad_norm=0.3, release_gradients=True, micro_batches=count)
    steps = SimpleNamespace(step=lambda index: change(data.step(index)))
    settings = {"steps": run.train.steps, "train": run.train, "optim": run.optim}
    loop = Loop(loaded.model.train(), optimizer, steps, None, **settings, meters=Meters(loaded.model))
    reports = list(loop.run(0))
    optimizer.close()
    return loaded.model.state_dict(), reports


def test_a_micro_batch_without_labels_contributes_nothing(write_run, tmp_path):
    path = write_run(**FP32, train__steps=3)
    with_masked, reports = train_on(path, tmp_path, lambda batches: [batches[0], masked(batches[1])])
    alone, expected = train_on(path, tmp_path, lambda batches: batches[:1])
    assert_same(with_masked, alone)
    assert [(r.loss, r.norm, r.trained) for r in reports] == [(r.loss, r.norm, r.trained) for r in expected]
    assert all(r.norm > 0.3 and r.skipped == 0 for r in reports)


def test_a_step_without_labels_only_decays(write_run, tmp_path):
    path = write_run(**FP32, train__steps=3)
    weights, reports = train_on(path, tmp_path, lambda batches: [masked(batch) for batch in batches])
    assert [(r.loss, r.norm, r.skipped, r.trained) for r in reports] == [(0.0, 0.0, 0, 0)] * 3
    run = read_run_file(path)
    for name, start in load_model(run.model.path, torch.float32).model.state_dict().items():
        for index in range(3) if start.ndim > 1 else ():
            start = start * (1 - learning_rate(index, 3, run.optim) * 0.1)
        assert torch.equal(weights[name], start), name


# -- gradients that are not finite -------------------------------------------------------------------------


def test_a_batch_with_nan_is_skipped_counted_and_named(
    write_run, write_model, tmp_path, one_strange_record, capsys
):
    """One record alone reaches an infinite embedding; the run goes on as if its step were not there."""

    def spoil(state):
        state["model.embed_tokens.weight"][seven] = math.inf

    seven = token(write_model("plain"), "7")
    model = write_model("spoilt", spoil, tie_word_embeddings=False)
    data = {"data__train": one_strange_record, "data__eval": None}
    path = write_run(**FP32, **data, model__path=model, train__seed=5)
    train(path)
    records = evidence.metrics(path)
    (bad,) = [record for record in records if "offender" in record]
    assert 1 < bad["step"] < 8
    assert (bad["offender"], bad["loss"], bad["norm"]) == ("model.embed_tokens.weight", None, None)
    assert [record["skipped"] for record in records] == [record["step"] >= bad["step"] for record in records]
    assert set(evidence.state(path)["counts"].values()) == {7}
    assert_same(evidence.tensors(path), train_plainly(path, tmp_path / "data"))
    printed, errors = capsys.readouterr()
    place = f"step {bad['step']} skipped: gradient not finite in model.embed_tokens.weight (1 so far)"
    assert [line for line in printed.splitlines() if line.startswith("!")] == [f"! {place}"]
    assert "1 step skipped" in printed and "skipped" not in errors


def test_a_run_that_skipped_every_step_is_no_success(write_run, write_model):
    """Fewer steps than train.max_skipped, each with the line break, which has an infinite embedding."""

    def spoil(state):
        state["model.embed_tokens.weight"][line_break] = math.inf

    line_break = token(write_model("plain"), "\n")
    model = write_model("spoilt", spoil, tie_word_embeddings=False)
    path = write_run(**FP32, model__path=model, train__steps=4, data__eval=None)
    for _ in range(2):
        with pytest.raises(RunStopped, match=r"every step was skipped .*, so nothing was trained: lower"):
            train(path)
        assert not (evidence.home(path) / "model").exists()
    assert evidence.metrics(path)[-1]["skipped"] == 4


@pytest.mark.parametrize("values", [{"optim__lr": 1e38}, {"optim__lr": 1e30, "optim__weight_decay": 1e30}])
def test_a_run_that_ends_with_weights_that_are_not_finite_is_no_success(write_run, values):
    path = write_run(train__steps=4, data__eval=None, **values)
    with pytest.raises(
        RunStopped, match=r"the last step was skipped and model\..* is not finite: lower optim\.lr"
    ):
        train(path)
    assert not (evidence.home(path) / "model").exists()


def test_a_run_without_a_finite_gradient_stops_and_stays_stopped(write_run, write_model):
    """The line break, which every chat has, has an infinite embedding."""

    def spoil(state):
        state["model.embed_tokens.weight"][line_break] = math.inf

    line_break = token(write_model("plain"), "\n")
    model = write_model("spoilt", spoil, tie_word_embeddings=False)
    path = write_run(**FP32, model__path=model, train__max_skipped=3, data__eval=None)
    sentence = r"3 steps in a row had a gradient that is not finite, the last in model\.embed_tokens\.weight"
    with pytest.raises(RunStopped, match=sentence):
        train(path)
    assert [record["skipped"] for record in evidence.metrics(path)] == [1, 2, 3]
    assert set(evidence.state(path, 2)["counts"].values()) == {0}
    assert not (evidence.home(path) / "model").exists()
    with pytest.raises(RunStopped, match="3 steps in a row"):
        train(path)
    assert [record["step"] for record in evidence.metrics(path)] == [1, 2, 3], "it remembers two of them"


def test_a_model_that_is_not_finite_from_the_start_is_refused(write_run, write_model):
    def spoil(state):
        state["model.norm.weight"][3] = math.nan

    with pytest.raises(UserError, match=r"not finite, because model\.norm\.weight holds NaN or infinity"):
        train(write_run(model__path=write_model("spoilt", spoil)))
