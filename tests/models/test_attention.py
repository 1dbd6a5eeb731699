from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, build
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import UserError
from headrace.models.attention import attach, check_packable, document_attention
from headrace.models.recompute import recompute_layers

LENGTH = 20
GRADIENT_ROUNDING = {"gemma2": 1e-5, "gemma3": 1e-5}  # their norm weights' gradients pass through fp32
MODULE = SimpleNamespace(config=SimpleNamespace())


@st.composite
def packed_rows(draw):
    """(row, start, stop) of documents in rows of LENGTH, with and without padding at the end."""
    documents = []
    for row in range(draw(st.integers(1, 3))):
        position = 0
        for length in draw(st.lists(st.integers(1, LENGTH), min_size=1, max_size=6)):
            if position + length > LENGTH:
                break
            documents.append((row, position, position + length))
            position += length
    return tuple(documents)


def rows_of(documents):
    return 1 + max(row for row, _, _ in documents)


def positions(documents):
    position_ids_BL = torch.zeros(rows_of(documents), LENGTH, dtype=torch.int64)
    for row, start, stop in documents:
        position_ids_BL[row, start:stop] = torch.arange(stop - start)
    return position_ids_BL


def losses(logits_BLV, input_ids_BL, documents):
    """Summed next-token loss of every document."""
    spans = [(row, slice(start, stop - 1), slice(start + 1, stop)) for row, start, stop in documents]
    pairs = [(logits_BLV[row, here], input_ids_BL[row, after]) for row, here, after in spans]
    return torch.stack([cross_entropy(x, y, reduction="sum") if len(y) else x.sum() * 0 for x, y in pairs])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed(model, input_ids_BL, documents):
    output = model(
        input_ids_BL, position_ids=positions(documents), documents=documents, use_cache=False
    ).logits
    per_document = losses(output, input_ids_BL, documents)
    return per_document, gradients(model, per_document.sum())


def unpacked(model, input_ids_BL, documents):
    alone = []
    for row, start, stop in documents:
        input_ids_1N = input_ids_BL[row : row + 1, start:stop]
        logits = model(input_ids_1N, use_cache=False).logits
        alone.append(losses(logits, input_ids_1N, ((0, 0, stop - start),)))
    per_document = torch.cat(alone)
    return per_document, gradients(model, per_document.sum())


def check_equal(a, b, loss, gradient):
    """Losses and gradients of two runs, each within its tolerance."""
    torch.testing.assert_close(a[0], b[0], rtol=loss, atol=loss)
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=gradient, atol=gradient)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=5)
@given(packed_rows(), st.integers(0, 1000))
def test_packed_equals_unpacked(family, documents, seed):
    torch.manual_seed(seed)
    input_ids_BL = torch.randint(0, 40, (rows_of(documents), LENGTH))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-4)):
        model = build(family, dtype)
        attach(model)
        a, b = (run(model, input_ids_BL, documents) for run in (packed, unpacked))
        check_equal(a, b, tolerance, max(tolerance, GRADIENT_ROUNDING.get(family, 0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_unpacked_equals_transformers(family):
    torch.manual_seed(1)
    input_ids_BL = torch.randint(0, 40, (2, LENGTH))
    documents = ((0, 0, LENGTH), (1, 0, LENGTH))
    model = build(family, torch.float64)
    reference = "eager" if family == "gemma2" else "sdpa"  # sdpa has no softcap; eager's softmax is fp32
    model.set_attn_implementation(reference)
    theirs = unpacked(model, input_ids_BL, documents)
    attach(model)
    loss, gradient = (1e-4, 1e-4) if family == "gemma2" else (1e-12, GRADIENT_ROUNDING.get(family, 1e-12))
    check_equal(packed(model, input_ids_BL, documents), theirs, loss, gradient)


def explicit(q_BHLD, k_BKLD, v_BKLD, documents, window, softcap, scaling):
    """The definition, position by position."""
    groups = q_BHLD.shape[1] // k_BKLD.shape[1]
    k_BHLD, v_BHLD = (x.repeat_interleave(groups, 1) for x in (k_BKLD, v_BKLD))
    output_BLHD = torch.zeros_like(q_BHLD.transpose(1, 2))
    for row, start, stop in documents:
        for position in range(start, stop):
            first = start if window is None else max(start, position - window + 1)
            seen = slice(first, position + 1)
            scores_HN = torch.einsum("hd,hnd->hn", q_BHLD[row, :, position], k_BHLD[row, :, seen]) * scaling
            if softcap is not None:
                scores_HN = softcap * torch.tanh(scores_HN / softcap)
            weights_HN = scores_HN.softmax(-1)
            output_BLHD[row, position] = torch.einsum("hn,hnd->hd", weights_HN, v_BHLD[row, :, seen])
    return output_BLHD


@settings(deadline=None, max_examples=60)
@given(
    packed_rows(),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.none() | st.integers(1, 25),
    st.none() | st.just(0.7),
    st.sampled_from([0.3, 1.0]),
)
def test_it_is_the_definition(documents, heads, window, softcap, scaling):
    query, key, value = (
        torch.randn(rows_of(documents), h, LENGTH, 8).double() for h in (heads[0], *heads[1:] * 2)
    )
    arguments = {"scaling": scaling, "sliding_window": window, "softcap": softcap}
    output_BLHD, weights = document_attention(
        MODULE, query, key, value, None, documents=documents, **arguments
    )
    expected = explicit(query, key, value, documents, window, softcap, scaling)
    assert weights is None and output_BLHD.is_contiguous()
    torch.testing.assert_close(output_BLHD, expected, rtol=1e-12, atol=1e-12)
    inside = torch.zeros(output_BLHD.shape[:2], dtype=torch.bool)
    for row, start, stop in documents:
        inside[row, start:stop] = True
    assert not output_BLHD[~inside].any(), "padding gives exactly zero"


def test_without_documents_the_whole_row_is_causal():
    query, key, value = torch.randn(3, 2, 4, LENGTH, 8).double()
    whole = tuple((row, 0, LENGTH) for row in range(2))
    output, _ = document_attention(MODULE, query, key, value, None)
    torch.testing.assert_close(output, explicit(query, key, value, whole, None, None, 8**-0.5))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_is_applied(softcap):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 4, LENGTH, 8)
    ones = torch.ones(1, 4, LENGTH, 8)
    documents = ((0, 0, 8), (0, 8, LENGTH))
    arguments = {"documents": documents, "softcap": softcap}
    kept, _ = document_attention(MODULE, query, key, ones, None, **arguments)
    torch.testing.assert_close(kept, torch.ones_like(kept))
    dropped, _ = document_attention(MODULE, query, key, ones, None, dropout=0.5, **arguments)
    assert not torch.allclose(dropped, kept)
    assert abs(dropped.mean() - 1) < 0.2


def test_gradient_checkpointing_passes_the_documents_on():
    documents = ((0, 0, 7), (0, 7, 15))
    input_ids_BL = torch.randint(0, 40, (1, LENGTH))
    model = build("llama", torch.float64)
    attach(model)
    kept = packed(model, input_ids_BL, documents)
    model.activation_checkpointing_enable()
    model.train()
    check_equal(packed(model, input_ids_BL, documents), kept, 0, 0)


def saved_bytes(model, input_ids_BL, documents):
    """Bytes of the unique storages that backward keeps, without the parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids_BL, documents=documents, use_cache=False)
    return sum(found.values())


def test_documents_cost_one_more_output_a_layer():
    """Queries, keys and values are saved as views; only what joins the outputs is new."""
    input_ids_BL = torch.randint(0, 40, (2, LENGTH))
    model = build("llama")
    attach(model)
    single = saved_bytes(model, input_ids_BL, ((0, 0, LENGTH), (1, 0, LENGTH)))
    output = 2 * LENGTH * 32 * 4
    for size in (2, 5, 10):
        documents = tuple((r, s, s + size) for r in range(2) for s in range(0, LENGTH, size))
        assert saved_bytes(model, input_ids_BL, documents) - single == 3 * output


def test_what_is_not_computed_is_refused():
    query = key = value = torch.randn(1, 2, 4, 8)

    def call(module=MODULE, query=query, mask=None, **kwargs):
        document_attention(module, query, key, value, mask, **kwargs)

    call(position_ids=torch.arange(4), output_attentions=False, s_aux=None)
    with pytest.raises(UserError, match="s_aux"):
        call(s_aux=torch.zeros(2))
    with pytest.raises(UserError, match="output_attentions"):
        call(output_attentions=True)
    with pytest.raises(UserError, match="both directions"):
        call(is_causal=False)
    with pytest.raises(UserError, match="both directions"):
        call(module=SimpleNamespace(is_causal=False))
    with pytest.raises(UserError, match="instead of attention_mask"):
        call(mask=torch.ones(1, 4))
    with pytest.raises(UserError, match="key-value cache"):
        call(query=query[:, :, :1])
    windowed = SimpleNamespace(config=SimpleNamespace(sliding_window=3))
    call(module=windowed, sliding_window=None)
    call(module=windowed, documents=((0, 0, 3), (0, 3, 4)))
    with pytest.raises(UserError, match=r"sliding_window=3, so 4 tokens"):
        call(module=windowed)


def test_a_mask_given_to_the_model_is_refused_and_not_dropped():
    model = build("llama")
    attach(model)
    with pytest.raises(UserError, match="leave the mask out"):
        model(torch.zeros(1, 4, dtype=torch.int64), attention_mask=torch.ones(1, 4), use_cache=False)


def test_a_model_that_does_not_hand_the_documents_on_keeps_them_apart_all_the_same():
    documents = ((0, 0, 7), (0, 7, LENGTH), (1, 0, LENGTH))
    input_ids_BL = torch.randint(0, 40, (2, LENGTH))
    model = build("stablelm", torch.float64)
    attach(model)
    a, b = (run(model, input_ids_BL, documents) for run in (packed, unpacked))
    check_equal(a, b, 1e-12, 1e-12)


def test_it_is_refused_where_others_recompute_its_layers():
    """In backward, outside the call, nobody would tell them of the documents."""
    model = build("stablelm").train()
    attach(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    input_ids_BL = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match=r"StableLmAttention is not handed .* use .*recompute_layers, or set"):
        model.model(input_ids_BL, documents=((0, 0, 2), (0, 2, 4)), use_cache=False)
    model(input_ids_BL, documents=((0, 0, 2),), use_cache=False)  # causal: padding at the end is not seen
    model(input_ids_BL, use_cache=False)
    recompute_layers(model)
    model(input_ids_BL, documents=((0, 0, 2), (0, 2, 4)), use_cache=False)
    model.eval().activation_checkpointing_enable({"use_reentrant": False})
    model(input_ids_BL, documents=((0, 0, 2), (0, 2, 4)), use_cache=False)


def test_an_architecture_outside_the_registry_is_refused():
    config = AutoConfig.for_model("bloom", vocab_size=40, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(UserError, match="BloomForCausalLM computes its attention outside"):
        attach(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    "kind", ["mamba", "mamba2", "rwkv", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next"]
)
def test_layers_that_are_not_attention_are_not_packed(kind):
    with pytest.raises(UserError, match=f"but {kind} has .*; set data.packing=false"):
        check_packable(AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "gpt2", "qwen3_moe"]
)
def test_attention_layers_are_packed(kind):
    check_packable(AutoConfig.for_model(kind))


def test_long_documents_that_turn_the_others_are_not_packed():
    """With longrope, the longest document of a call decides how all of them rotate."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "rope_theta": 1e4}
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=12, pad_token_id=0)
    attach(model)
    input_ids_BL = torch.randint(0, 40, (1, LENGTH))
    for border, is_apart in ((12, True), (13, False)):
        documents = ((0, 0, border), (0, border, LENGTH))
        together, alone = (run(model, input_ids_BL, documents)[0] for run in (packed, unpacked))
        assert torch.allclose(together[1], alone[1], rtol=1e-5) == is_apart
    check_packable(model.config, 12)
    with pytest.raises(UserError, match=r"data\.context=13 would .* more than 12 tokens .*\(longrope\); set"):
        check_packable(model.config, 13)
