import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, SMALL, build, tiny_tokenizer, write_gguf
from transformers import AutoModelForCausalLM, GenerationConfig

from headrace.errors import UserError
from headrace.models.load import load_model, load_tokenizer

IDS = torch.arange(18).view(2, 9)
pytestmark = pytest.mark.filterwarnings("error:.*transformers converted them")  # unless a test expects it


def logits(model):
    model.set_attn_implementation("eager")  # one and the same on both sides
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def check_equal_to_transformers(path, dtype):
    """Parameters, buffers and logits are those that plain transformers loads."""
    ours = load_model(path, dtype).model
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for kind in ("named_parameters", "named_buffers"):
        a, b = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (ours, theirs))
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_loads_as_in_transformers(tmp_path, family, tied):
    model = build(family, torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    check_equal_to_transformers(tmp_path / "one", torch.bfloat16)
    check_equal_to_transformers(tmp_path / "many", torch.bfloat16)
    check_equal_to_transformers(tmp_path / "many", torch.float32)


def test_tied_weights_are_tied_and_trainable(tmp_path):
    build("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "headrace"
    assert not model.training


def rewrite(path, change):
    """Change the tensors of a saved model."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_harmless_extras_are_accepted(tmp_path):
    build("llama").save_pretrained(tmp_path)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(tmp_path, add)
    load_model(tmp_path, torch.float32)


def test_a_tied_tensor_may_be_stored_under_its_other_name(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.__setitem__("lm_head.weight", t.pop("model.embed_tokens.weight")))
    assert torch.equal(logits(load_model(tmp_path, torch.float32).model), logits(model))


def test_tied_tensors_that_differ_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"] + 1))
    with pytest.raises(UserError, match="tie_word_embeddings to false"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"lacks 1 tensor, first model\.norm\.weight"),
        ("model.mystery", torch.ones(3), r"holds 1 tensor that .* first model\.mystery"),
        ("model.norm.weight", torch.ones(3), r"of another shape .*model\.norm\.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, name, tensor, message):
    build("llama").save_pretrained(tmp_path)

    def change(tensors):
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path, torch.float32)


def test_a_torn_weight_file_is_named(tmp_path):
    build("llama").save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_read_one_by_one_and_merged(tmp_path, family, merged):
    sizes = {"num_local_experts": 3} if family == "mixtral" else {"num_experts": 3, "num_experts_per_tok": 2}
    model = build(family, torch.bfloat16, **sizes)
    model.save_pretrained(tmp_path, save_original_format=not merged)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(".experts.0." in name for name in names) != merged
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a second copy of the model
        check_equal_to_transformers(tmp_path, torch.bfloat16)


def test_other_names_are_converted_with_a_warning(tmp_path):
    """GPT-2 is published like this: without the prefix of the model that has the head."""
    build("gpt2", torch.bfloat16).transformer.save_pretrained(tmp_path)
    assert "h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda t: t.__setitem__("h.0.attn.bias", torch.ones(1, 1, 4, 4)))
    with pytest.warns(UserWarning, match="transformers converted them"):
        check_equal_to_transformers(tmp_path, torch.bfloat16)


def test_an_expert_that_is_missing_is_named(tmp_path):
    build("mixtral", torch.bfloat16, num_local_experts=3).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(UserError, match=r"only a part of them, first .*experts"):
        load_model(tmp_path, torch.float32)


def test_from_scratch_is_seeded_and_leaves_the_random_state_alone(tmp_path):
    config = {**SMALL, **FAMILIES["gemma3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = torch.get_rng_state()
    path = tmp_path / "config.json"
    one, same, other = (load_model(path, torch.float32, seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(logits(one), logits(same))
    assert not torch.equal(logits(one), logits(other))
    narrow = load_model(path, torch.bfloat16, seed=1).model
    for a, b in zip(one.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), "drawn in fp32 and cast"
    narrow.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(logits(narrow), logits(again)), "buffers too are as transformers makes them"


def test_generation_config_and_tokenizer_come_along(tmp_path):
    model = build("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, top_k=11)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).tokenizer is None
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.model.generation_config.top_k == 11
    assert loaded.model.config.architectures == ["LlamaForCausalLM"]
    assert loaded.tokenizer("b a")["input_ids"] == load_tokenizer(tmp_path)("b a")["input_ids"] == [2, 1]


def test_a_gguf_file_loads_as_the_model_it_was_made_from(tmp_path):
    pytest.importorskip("gguf")
    model = build("llama")
    write_gguf(model, tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf", torch.float32)
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.tokenizer is None
    narrow = load_model(tmp_path / "m.gguf", torch.bfloat16).model
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}


def test_a_gguf_file_brings_its_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    write_gguf(build("llama"), tmp_path / "m.gguf", tokens=["<unk>", "<s>", "</s>", *"abcdef"])
    tokenizer = load_model(tmp_path / "m.gguf").tokenizer
    assert tokenizer.convert_tokens_to_ids("c") == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "wonder"}, "does not know model_type wonder"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({**SMALL, "model_type": "llama", "hidden_size": 33}, "configuration is not valid"),
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}, "outside transformers"),
    ],
)
def test_architectures_that_cannot_be_trained_are_refused(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "config.json")
