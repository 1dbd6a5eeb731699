"""Names, shapes and order of parameters against transformers; configs that miss or contradict something."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import BASE, CONFIGS, config_of
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import UserError
from headrace.planner.families import FAMILIES
from headrace.planner.shape import ModelShape

logging.getLogger("transformers").setLevel(logging.ERROR)

QUIET = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
NEEDED: dict[str, dict] = {
    "gpt2": QUIET,  # trains with dropout by default, which is not planned
    "ministral": {"head_dim": 2},  # its own default, None, builds no model
}
OPTIONAL = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias")


def on_meta(config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)


def assert_equal(config: dict) -> None:
    shape, model = ModelShape.from_config(config), on_meta(config)
    theirs = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert [(parameter.name, parameter.shape) for parameter in shape.parameters] == theirs
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())
    assert shape.buffer_bytes(2) == sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    assert_equal(config_of(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_has_transformers_default(family: str) -> None:
    config = {"model_type": family, **BASE, "hidden_size": 64, "num_attention_heads": 32}
    del config["num_key_value_heads"]
    assert not config.keys() & OPTIONAL
    assert_equal(config | NEEDED.get(family, {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_transformers_writes_is_read(family: str) -> None:
    config = {"model_type": family, **BASE, "head_dim": 16, "tie_word_embeddings": True}
    for key in FAMILIES[family].ignored:
        config.pop(key, None)
    assert_equal(AutoConfig.for_model(**config, **QUIET).to_dict())


def test_qwen3_8b() -> None:
    shape = ModelShape.from_config(
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        }
    )
    assert (shape.numel, len(shape.parameters), shape.largest) == (8_190_735_360, 399, 151936 * 4096)


@settings(deadline=None, max_examples=20)
@given(
    heads=st.integers(1, 4), groups=st.integers(1, 3), size=st.integers(1, 5), width=st.integers(1, 9),
    layers=st.integers(1, 3), tied=st.booleans(), vocab=st.integers(1, 70)
)  # fmt: skip
def test_any_sizes(
    heads: int, groups: int, size: int, width: int, layers: int, tied: bool, vocab: int
) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 2 * heads * groups * width,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "head_dim": 2 * size,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * width,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    assert_equal(config)


def test_dropout_that_is_there_by_default_is_named() -> None:
    config = config_of("gpt2")
    del config["resid_pdrop"]
    with pytest.raises(UserError, match=r"resid_pdrop 0\.1 by default cannot be planned: set it to 0"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "kinds"),
    [
        ("qwen2", {"sliding_window": 9}, "fff"),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, "ffs"),
        ("mistral", {"sliding_window": 9}, "sss"),
        ("phi3", {}, "fff"),
        ("gemma2", {}, "sfs"),
        ("gemma3_text", {}, "sfs"),
        ("cohere2", {}, "sssfs"),
        ("olmo3", {"layer_types": ["full_attention"] * 4}, "ffff"),
    ],
)  # fmt: skip
def test_kinds_of_layers_are_those_of_transformers(name: str, changes: dict, kinds: str) -> None:
    config = config_of(name, **changes)
    assert "".join(kind[0] for kind in ModelShape.from_config(config).kinds) == kinds
    listed = getattr(AutoConfig.for_model(**config), "layer_types", None)
    assert listed is None or "".join(kind[0] for kind in listed) == kinds


def test_parameters_are_aligned_as_in_the_optimizer() -> None:
    shape = ModelShape.from_config(config_of("llama with biases"))
    assert shape.aligned_numel == sum(-(-p.numel // 16) * 16 for p in shape.parameters) > shape.numel


def test_an_unknown_family_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"model_type 'mamba' in config.json cannot be planned; these can: cohere, "
    ):
        ModelShape.from_config({**BASE, "model_type": "mamba"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"hidden_size": None}, "config.json of the llama model has no hidden_size: add it"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers in config.json must be .* above zero"),
        ("llama", {"vocab_size": "many"}, "vocab_size .* not 'many'"),
        ("llama", {"vocab_size": True}, "vocab_size .* not True"),
        ("llama", {"hidden_size": 42}, "hidden_size 42 .* not a multiple of num_attention_heads 4"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 .* not a multiple of .* 3"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' .* cannot be planned; these can: silu"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1 .* set it to 0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised .* take the original checkpoint"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types .* lists 1 layers, .* says 3"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 .* is more than num_local_experts 6"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop 0.1 in config.json cannot be planned: set it to 0"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' .* these can: silu"),
        ("starcoder2", {"residual_dropout": 0.1}, "residual_dropout 0.1 in config.json .* set it to 0"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm in config.json of the phi model .* a model without it"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm in config.json of the cohere model .* without it"),
        ("mixtral", {"num_local_experts": None}, "the mixtral model has no num_local_experts"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps in config.json must .* between 0 and 1, not -1"),
        ("qwen3", {"rms_norm_eps": -1e-6}, "rms_norm_eps .* not -1e-06"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps .* not nan"),
        ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon .* not 0"),
        ("phi", {"layer_norm_eps": True}, "layer_norm_eps .* not True"),
        ("starcoder2", {"norm_epsilon": "1e-5"}, "norm_epsilon .* not '1e-5'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_config_is_said(name: str, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelShape.from_config(config_of(name, **changes))
