"""From micro-batches to losses: as transformers' own, packed or not; a head that is not linear is refused."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from headrace.data.batch import MicroBatch
from headrace.errors import UserError
from headrace.models.attention import attach
from headrace.training.forward import check_head, forward_loss, forward_token_losses, output_head

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=64,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
    }
    return models[name]().eval()  # GPT-2 has dropout


def micro_batch(*lengths: int, seed: int = 0) -> MicroBatch:
    """One row of documents, each with its first two tokens untrained."""
    draw = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=draw)
    labels_BL = torch.full_like(ids_BL, -100)
    documents, start = [], 0
    for length in lengths:
        stop = start + length
        labels_BL[0, start + 1 : stop - 1] = ids_BL[0, start + 2 : stop]
        documents.append((0, start, stop))
        start = stop
    positions_BL = torch.cat([torch.arange(length) for length in lengths])[None]
    return MicroBatch(ids_BL, labels_BL, positions_BL, tuple(documents), int((labels_BL != -100).sum()))


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", ["llama", "tied", "gemma2", "granite", "cohere", "gpt2"])
def test_equals_the_models_own_loss(name: str) -> None:
    model, batch = build(name), micro_batch(24)
    check_head(model)
    attach(model)
    ours = forward_loss(model, batch, 1 / batch.valid_tokens, chunk=7)
    own_labels_BL = batch.input_ids_BL.clone()
    own_labels_BL[0, :2] = -100
    theirs = model(input_ids=batch.input_ids_BL, labels=own_labels_BL, use_cache=False).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for a, b in zip(gradients(model, ours), gradients(model, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_packed_equals_unpacked() -> None:
    model = build("llama").double()
    attach(model)
    packed, parts = micro_batch(9, 14, 5), []
    for _, start, stop in packed.documents:
        piece = slice(start, stop)
        tensors = (packed.input_ids_BL, packed.labels_BL, packed.position_ids_BL)
        parts.append(MicroBatch(*(x[:, piece] for x in tensors), ((0, 0, stop - start),), stop - start - 2))
    whole = forward_loss(model, packed, 0.1, chunk=6)
    summed = sum(forward_loss(model, part, 0.1, chunk=6) for part in parts)
    torch.testing.assert_close(whole, summed, rtol=1e-6, atol=0)  # rotary angles and norms are fp32
    alone_BL = torch.cat([forward_token_losses(model, part, chunk=6) for part in parts], dim=1)
    together_BL = forward_token_losses(model, packed, chunk=6)
    torch.testing.assert_close(together_BL, alone_BL, rtol=1e-5, atol=1e-6)
    assert float(together_BL.sum() * 0.1) == pytest.approx(float(whole.detach()), rel=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_heads_are_recognised_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check_head(build(name).to(dtype))


def test_a_cap_or_scaling_that_the_config_does_not_name_is_refused() -> None:
    capped = build("gemma2")
    original = output_head(capped)
    assert original.softcap == 2.0
    plain = build("llama")
    plain.config.final_logit_softcapping = 30.0  # the model itself does not cap
    with pytest.raises(UserError, match=r"LlamaForCausalLM does more between hidden states and logits"):
        check_head(plain)
    plain.config.final_logit_softcapping = None
    plain.config.logit_scale = 0.5
    with pytest.raises(UserError, match=r"cannot be computed in chunks"):
        check_head(plain)


def test_a_head_with_further_layers_is_refused() -> None:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
    )
    with pytest.raises(UserError, match=r"BertLMHeadModel does more between"):
        check_head(BertLMHeadModel(config))


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match=r"LlamaForCausalLM ends in Sequential"):
        check_head(model)


def test_probe_leaves_no_trace() -> None:
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_head(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not model.get_decoder()._forward_hooks


@pytest.mark.parametrize("vocabulary", [1, 2, 3])
def test_a_vocabulary_of_hardly_any_tokens_can_be_looked_at(vocabulary):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=vocabulary, num_key_value_heads=2, **sizes)
    check_head(AutoModelForCausalLM.from_config(config))
