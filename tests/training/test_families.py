"""Every family that can be planned: loss, gradients and what is saved are those of plain transformers.

The reference is ``model(input_ids, labels=...)`` with transformers' ``eager`` attention, whole logits and its
own loss; ours is attention by document, the chunked loss, and layers that are recomputed.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace.data.batch import MicroBatch
from headrace.errors import UserError
from headrace.models.attention import attach, check_packable
from headrace.models.load import load_model
from headrace.models.recompute import recompute_layers
from headrace.models.save import model_entries, save_model
from headrace.planner.families import FAMILIES
from headrace.training.forward import check_head, forward_loss

VOCABULARY, LENGTH, WINDOW, CHUNK = 97, 24, 7, 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "ministral": {"model_type": "ministral", "sliding_window": WINDOW, "head_dim": 8},
    "granite": {
        "model_type": "granite",
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "gemma": {"model_type": "gemma", "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 6,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": WINDOW, "num_hidden_layers": 4},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "phi3": {
        "model_type": "phi3",
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "gpt2": {
        "model_type": "gpt2",
        "scale_attn_by_inverse_layer_idx": True,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox in sequence": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm in parallel": {
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "logit_scale": 0.25,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral, balanced": {"model_type": "mixtral", "num_local_experts": 4, **EXPERTS},
    "qwen3_moe, balanced": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "mlp_only_layers": [1],
        **EXPERTS,
    },
}
BALANCED = [name for name in CONFIGS if "balanced" in name]


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """In training mode, with weights that make every term count: biases and norms differ from 0 and 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SIZES, **CONFIGS[name], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.1)
    return model.train()


def micro_batch(*rows: Iterable[int], length: int = LENGTH, seed: int = 0) -> MicroBatch:
    """Documents of the given lengths, row by row; the first two tokens of each are not trained."""
    draw = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(3, VOCABULARY, (len(rows), length), generator=draw)
    labels_BL, positions_BL = torch.full_like(ids_BL, -100), torch.zeros_like(ids_BL)
    documents = []
    for row, lengths in enumerate(rows):
        start = 0
        for stop in torch.tensor(list(lengths)).cumsum(0).tolist():
            labels_BL[row, start + 1 : stop - 1] = ids_BL[row, start + 2 : stop]
            positions_BL[row, start:stop] = torch.arange(stop - start)
            documents.append((row, start, stop))
            start = stop
        ids_BL[row, start:] = 0
    return MicroBatch(ids_BL, labels_BL, positions_BL, tuple(documents), int((labels_BL != -100).sum()))


WHOLE = micro_batch([LENGTH], [LENGTH])
PACKED = micro_batch([9, 15], [3, 12, 5])


def apart(batch: MicroBatch) -> list[MicroBatch]:
    """Each document alone."""
    alone = []
    for row, start, stop in batch.documents:
        tensors = (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL)
        cut = [x[row : row + 1, start:stop] for x in tensors]
        alone.append(MicroBatch(*cut, ((0, 0, stop - start),), int((cut[1] != -100).sum())))
    return alone


def theirs(model: PreTrainedModel, batch: MicroBatch, **options: Any) -> Tensor:
    """Transformers' own mean loss; it shifts labels itself."""
    labels_BL = torch.full_like(batch.labels_BL, -100)
    labels_BL[:, 1:] = batch.labels_BL[:, :-1]
    return model(input_ids=batch.input_ids_BL, labels=labels_BL, **options).loss


def ours(model: PreTrainedModel, *batches: MicroBatch) -> Tensor:
    """The loss of one step of these micro-batches."""
    scale = 1 / sum(batch.valid_tokens for batch in batches)
    return torch.stack([forward_loss(model, batch, scale, CHUNK) for batch in batches]).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference in any parameter's gradient, relative to that gradient's largest element."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of two whole gradients, relative to the second."""
    assert a.keys() == b.keys()
    squares = [((a[name].double() - b[name]).square().sum(), b[name].double().square().sum()) for name in b]
    return float((sum(x for x, _ in squares) / sum(y for _, y in squares)) ** 0.5)


ROUNDINGS = 3 * 3 * 16
"""Between a weight and its gradient: three layers of about 16 operations, one forward and two backward."""

FP32_LOSS, FP32_GRADIENT = 4 * 2**-24, ROUNDINGS * 2**-24
"""Unit roundoff is 2^-24. The loss is a mean of terms alike, each rounded a few times; an element of a
gradient may be off by all roundings in one direction."""

BF16_LOSS, BF16_GRADIENT = 2**-8, ROUNDINGS**0.5 * 2**-8
"""Unit roundoff is 2^-8. Tokens' errors average out in the loss; those of a whole gradient are a random walk.
An error of the method would be of the size of the gradient."""


def test_every_family_that_can_be_planned_is_tested() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_equals_plain_transformers(name: str) -> None:
    model = build(name)
    their_loss = theirs(model, WHOLE)
    reference = gradients(model, their_loss)
    check_head(model)
    attach(model)
    our_loss = ours(model, WHOLE)
    torch.testing.assert_close(our_loss, their_loss, rtol=FP32_LOSS, atol=0)
    assert worst(gradients(model, our_loss), reference) <= FP32_GRADIENT
    assert reference.keys() == {parameter for parameter, _ in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_lies_within_rounding_of_fp32_and_no_farther_than_plain_transformers(name: str) -> None:
    model, exact = build(name, torch.bfloat16), build(name)
    exact.load_state_dict(model.state_dict())
    exact_loss = theirs(exact, WHOLE)
    reference = gradients(exact, exact_loss)
    plain = distance(gradients(model, theirs(model, WHOLE)), reference)
    attach(model)
    our_loss = ours(model, WHOLE)
    error = distance(gradients(model, our_loss), reference)
    torch.testing.assert_close(our_loss, exact_loss, rtol=BF16_LOSS, atol=0)
    assert error <= BF16_GRADIENT
    assert error <= 1.5 * plain


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in BALANCED])
def test_documents_are_kept_apart(name: str) -> None:
    """In rows with padding, longer and shorter than the window, and where one is the row's first or not."""
    model = build(name)
    attach(model)
    check_packable(model.config, LENGTH)
    packed, alone = ours(model, PACKED), ours(model, *apart(PACKED))
    torch.testing.assert_close(packed, alone, rtol=FP32_LOSS, atol=0)
    together = gradients(model, packed)
    assert worst(together, gradients(model, alone)) <= FP32_GRADIENT


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_layers_give_the_same_bits(name: str) -> None:
    model = build(name)
    attach(model)
    kept = gradients(model, ours(model, PACKED))
    recompute_layers(model)
    again = gradients(model, ours(model, PACKED))
    assert all(torch.equal(again[parameter], gradient) for parameter, gradient in kept.items())


@pytest.mark.parametrize("name", BALANCED)
def test_balancing_counts_packed_documents_as_a_masked_batch(name: str) -> None:
    """One document a row with padding, as transformers has it, and the same documents packed."""
    model = build(name)
    rows = [stop - start for _, start, stop in PACKED.documents]
    padded = micro_batch(*([length] for length in rows), length=max(rows))
    for target, alone in zip(range(len(rows)), apart(PACKED), strict=True):
        length = rows[target]
        padded.input_ids_BL[target, :length] = alone.input_ids_BL
        padded.labels_BL[target, :length] = alone.labels_BL
    mask_BL = torch.arange(max(rows)) < torch.tensor(rows)[:, None]
    reference = theirs(model, padded, attention_mask=mask_BL)
    expected = gradients(model, reference)
    assert not torch.equal(reference, theirs(model, padded)), "padding would count"
    attach(model)
    for batch in (padded, PACKED):
        loss = ours(model, batch)
        torch.testing.assert_close(loss, reference, rtol=FP32_LOSS, atol=0)
        assert worst(gradients(model, loss), expected) <= FP32_GRADIENT


@pytest.mark.parametrize("name", BALANCED)
def test_balancing_is_weighted_by_trained_tokens_and_not_by_micro_batches(name: str) -> None:
    batches = [micro_batch([LENGTH], [LENGTH]), micro_batch([20], length=20, seed=1)]
    model, plain = build(name), build(name, output_router_logits=False)
    trained = [batch.valid_tokens for batch in batches]
    shares = [count / sum(trained) for count in trained]
    losses = [theirs(model, batch) * share for batch, share in zip(batches, shares, strict=True)]
    expected = torch.stack(losses).sum()
    reference = gradients(model, expected)
    attach(model)
    attach(plain)
    loss = ours(model, *batches)
    torch.testing.assert_close(loss, expected, rtol=FP32_LOSS, atol=0)
    assert worst(gradients(model, loss), reference) <= FP32_GRADIENT
    balance = (loss - ours(plain, *batches)) / model.router_aux_loss_coef
    assert 1.9 < balance < 3, (
        "two of four experts see a token: perfect balance is 2, in any number of batches"
    )


@pytest.mark.parametrize("name", BALANCED)
def test_balancing_losses_like_mixtrals_are_recognised(name: str) -> None:
    check_head(build(name))


@pytest.mark.parametrize("kind", ["jetmoe", "glm4_moe"])
def test_a_balancing_loss_that_is_another_or_none_is_refused(kind: str) -> None:
    experts = {"num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(kind, **{**SIZES, **experts, **EXPERTS})
    with pytest.raises(UserError, match=r"output_router_logits=true in config\.json asks .* set it to false"):
        check_head(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_loads_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name, dtype).eval()
    with torch.no_grad():
        expected = model(WHOLE.input_ids_BL, use_cache=False).logits
    attach(model)
    save_model(tmp_path / "model", model_entries(model), model.config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert again.dtype == dtype
    with torch.no_grad():
        assert torch.equal(again(WHOLE.input_ids_BL, use_cache=False).logits, expected)
    loaded = load_model(tmp_path / "model", dtype).model
    for (parameter, a), b in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), parameter


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' in config.json cannot be planned; these can: cohere, "),
        (
            {**CONFIGS["gpt2"], "attn_pdrop": 0.1},
            "attn_pdrop 0.1 in config.json cannot be planned",
        ),
        (
            {**CONFIGS["phi"], "qk_layernorm": True},
            "qk_layernorm in config.json of the phi model",
        ),
        (
            {**CONFIGS["gpt2"], "n_positions": 32, "max_position_embeddings": None},
            "data.context=64 is more than the 32 positions",
        ),
    ],
)
def test_what_a_family_cannot_do_is_said_in_one_sentence(config: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **config}))
    (tmp_path / "run.yaml").write_text(
        json.dumps({"model": {"path": "config.json"}, "data": {"train": "none.jsonl", "context": 64}})
    )
    command = [sys.executable, "-m", "headrace", "plan", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
