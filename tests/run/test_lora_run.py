"""Runs that train adapters: PEFT's bits, exact resumption, what is saved and exported, and every mistake."""

import json
import shutil
import signal
import sys
from pathlib import Path

import evidence
import pytest
import torch
from safetensors.torch import load_file
from test_cases import assert_same, clip
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.data.prepare import prepare
from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.models.attention import attach
from headrace.models.load import load_model
from headrace.models.sample import answer
from headrace.run.export import export
from headrace.run.file import read_run_file
from headrace.run.plan import plan
from headrace.run.train import train
from headrace.training.forward import forward_loss
from headrace.training.lr import learning_rate

sys.path.insert(0, str(Path(__file__).parent))
from test_kills import execute

peft = pytest.importorskip("peft")

IDS = torch.arange(2, 42).view(2, 20)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    """The tiny model with weights, untied so that logits are not those of its input."""
    return write_base(tiny, tmp_path_factory.mktemp("base") / "base", seed=5)


def write_base(tiny, path, seed):
    shutil.copytree(tiny / "model", path)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(path, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture
def write_lora(write_run, base):
    """A run file as `write_run` gives, with adapters of rank 8 beside a model that has weights."""

    def write(name="run", **values):
        return write_run(name, **{"model__path": base, "model__lora": {"rank": 8, "alpha": 16}, **values})

    return write


def adapter(path, directory="model"):
    return load_file(evidence.home(path) / directory / "adapter_model.safetensors")


def everything(path):
    return adapter_file(path), evidence.states(path), evidence.metrics(path)


def adapter_file(path):
    files = sorted((evidence.home(path) / "model").iterdir())
    return {file.name: file.read_bytes() for file in files}


def logits(model):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


def train_by_peft(path, directory):
    """The same steps by peft.get_peft_model, plain PyTorch and torch's fused AdamW."""
    run = read_run_file(path)
    loaded, lora = load_model(run.model.path, torch.float32), run.model.lora
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(run.train.seed)
    theirs = peft.get_peft_model(loaded.model, config)
    model = theirs.base_model.model.train()
    attach(model)
    rows = {"batch": run.train.batch, "micro_batch": run.train.micro_batch, "seed": run.train.seed}
    data = prepare(run.data, loaded.tokenizer, directory=directory, **rows).train
    optim = run.optim
    trained = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    torch.set_num_threads(run.threads.compute)
    for index in range(run.train.steps):
        batches = data.step(index)
        for batch in batches:
            scale = 1.0 / sum(batch.valid_tokens for batch in batches)
            forward_loss(model, batch, scale, run.train.loss_chunk).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(index, run.train.steps, optim)
        clip(trained, optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return peft.get_peft_model_state_dict(theirs)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(("steps", "limit"), [(1, 0.0), (8, 0.05)])
def test_a_run_has_the_bits_of_pefts_own_training(write_lora, tmp_path, steps, limit, activations):
    """In fp32: one step without clipping, and eight with it."""
    values = {"optim__max_grad_norm": limit, "train__steps": steps, "memory__activations": activations}
    path = write_lora(model__dtype="fp32", **values)
    train(path)
    assert_same(adapter(path), train_by_peft(path, tmp_path / "data"))
    assert all(record["norm"] > limit for record in evidence.metrics(path))
    assert all(tensor.any() for tensor in adapter(path).values())


def test_a_killed_run_ends_like_one_that_was_not(processes, write_lora):
    whole, killed = write_lora("whole"), write_lora("killed")
    assert execute(processes, whole) == 0
    for moment in (("backward", 5, 0.0), ("save", 0, 0.01), ("update", 2, 0.0)):
        assert execute(processes, killed, (), *moment) == -signal.SIGKILL
    assert execute(processes, killed) == 0
    assert everything(killed) == everything(whole)


def test_checkpoints_hold_adapters_alone(write_lora):
    path = write_lora()
    train(path)
    master = evidence.table(path, "master")
    assert {name.split(".")[-3] for name in master} == {"lora_A", "lora_B"}
    assert len(master) == 2 * 2 * 7
    saved = adapter(path)
    plain = {f"base_model.model.{n.replace('.default.', '.')}": t.bfloat16() for n, t in master.items()}
    assert_same(saved, plain)


def test_the_adapter_is_pefts_and_samples(write_lora, base, capsys):
    path = write_lora()
    train(path)
    out = evidence.home(path) / "model"
    assert f"Model  {out}: 28 tensors written, read back, equal" in capsys.readouterr().out
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), out, autocast_adapter_dtype=False
    )
    assert_same(peft.get_peft_model_state_dict(theirs), adapter(path))
    assert peft.PeftConfig.from_pretrained(out).base_model_name_or_path == base
    assert answer(str(out), "water mill", tokens=6) != answer(base, "water mill", tokens=6)
    train(path)
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_is_the_adapter_and_merged_the_whole_model(write_lora, base, tmp_path, dtype):
    path = write_lora(model__dtype=dtype)
    train(path)
    out, wanted = tmp_path / "adapter", {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert export(evidence.home(path), out) == (28, 8)
    assert (out / "adapter_model.safetensors").read_bytes() == adapter_file(path)["adapter_model.safetensors"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=wanted)
    before = logits(plain)
    apart = logits(peft.PeftModel.from_pretrained(plain, out, autocast_adapter_dtype=False).base_model.model)
    export(evidence.home(path), tmp_path / "merged", merged=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=wanted)
    assert {p.dtype for p in whole.parameters()} == {wanted}
    found, largest = logits(whole), apart.abs().max()
    # Weights and activations are rounded in another order: within 16 roundings of the largest logit.
    tolerance = 16 * torch.finfo(wanted).eps * largest
    assert (found - apart).abs().max() <= tolerance < (found - before).abs().max()


def test_an_export_in_fp32_has_the_master_weights(write_lora, tmp_path):
    path = write_lora()
    train(path)
    export(evidence.home(path), tmp_path / "wide", "fp32")
    master = evidence.table(path, "master").items()
    expected = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in master}
    assert_same(load_file(tmp_path / "wide" / "adapter_model.safetensors"), expected)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_planned_is_measured(write_lora, dtype, activations):
    path = write_lora(model__dtype=dtype, memory__activations=activations)
    planned = plan(path)
    numel = planned.shape.trained_numel
    assert f"LoRA of rank 8 on 14 linear layers ({numel / 1e6:.1f} M trained)" in planned.text()
    train(path)
    both = json.loads((evidence.home(path) / "ledger.json").read_text("utf-8"))
    predicted, measured = (Ledger.from_json(both[key]) for key in ("predicted", "measured"))
    for purpose in ("weights", "states", "buffers"):
        assert measured.peaks["ram"][purpose] == predicted.peaks["ram"][purpose], purpose
    # Beside the sums, gradients that wait for their turn: of both micro-batches at most.
    waiting = measured.peaks["ram"]["gradients"] - 4 * planned.shape.aligned_numel
    assert 0 <= waiting <= 2 * numel * planned.work.element
    for lane in ("d2h", "h2d"):
        assert measured.lane_bytes(lane) == measured.steps * predicted.lane_bytes(lane) > 0
    found, expected = (ledger.peaks["ram"]["activations"] for ledger in (measured, predicted))
    assert abs(found / expected - 1) < 0.05


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 0}, r"model\.lora\.rank=0 in .*must be above 0"),
        ({"alpha": -1}, r"model\.lora\.alpha=-1 in .*must be above 0"),
        ({"rnk": 4}, r"model\.lora\.rnk in .* is not a key: did you mean model\.lora\.rank\?"),
        ({"targets": []}, r"model\.lora\.targets=\[\] in .*must be all-linear, or a list that is not empty"),
        ({"targets": ["q_prj"]}, r"model\.lora\.targets=q_prj names no linear layer .*did you mean q_proj\?"),
        ({"targets": "embed_tokens"}, r"model\.lora\.targets=embed_tokens names no linear layer"),
    ],
)
def test_a_wrong_setting_is_a_sentence(write_lora, lora, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(write_lora(model__lora=lora))


def test_adapters_need_weights_to_stand_beside(write_lora, tiny):
    config = str(tiny / "model" / "config.json")
    path = write_lora(model__path=config)
    assert f"! {config} has no weights, which model.lora needs" in plan(path).text()
    with pytest.raises(
        UserError, match=r"model\.lora adapts trained weights, and model\.path=.*config\.json"
    ):
        train(path)


def test_an_adapter_is_no_model_to_start_from(write_lora):
    first = write_lora("first")
    train(first)
    again = write_lora("again", model__path=str(evidence.home(first) / "model"))
    with pytest.raises(UserError, match=r"model\.path=.*first/model holds an adapter, .*give model\.path="):
        train(again)


def test_a_run_without_adapters_has_nothing_to_merge(write_lora, tmp_path):
    path = write_lora(model__lora=None, train__steps=1)
    train(path)
    with pytest.raises(UserError, match=r"--merge: .* has no adapter: leave --merge out"):
        export(evidence.home(path), tmp_path / "out", merged=True)


def test_another_base_is_refused_on_resumption_and_on_export(write_lora, tiny, tmp_path):
    model = Path(write_base(tiny, tmp_path / "base", seed=5))
    path = write_lora(model__path=str(model))
    train(path)
    shutil.rmtree(model)
    write_base(tiny, model, seed=6)
    longer = ["train.steps=9"]
    sentence = r"model\.path=.* holds other weights than those beside which .*checkpoint-8 was trained"
    with pytest.raises(UserError, match=sentence):
        train(path, longer)
    with pytest.raises(UserError, match=sentence):
        export(evidence.home(path), tmp_path / "out", merged=True)
    train(path, [*longer, "checkpoint.accept_changes=true"])
    assert evidence.steps(path)[-1] == 9


def test_another_rank_is_another_run(write_lora):
    path = write_lora()
    train(path)
    with pytest.raises(UserError, match=r"other settings \(model\.lora\.rank: 8 -> 4\)"):
        train(path, ["model.lora.rank=4", "train.steps=9"])
