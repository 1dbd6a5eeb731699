"""The decoder families that the planner knows: how transformers 5.24 builds and computes each of them.

Only what decides names, shapes and saved activations stands here. Defaults are those of transformers' own
config classes, for keys that a config.json may leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.planner import parameters
from headrace.planner.parameters import Table

Norms = Literal["before", "after", "both", "shared"]
"""Where a layer normalises: before its two blocks (Llama), after them (OLMo 2), both (Gemma 2), or once for
two blocks side by side (Phi)."""

Root = Literal["cast", "float", "mixed", "layer", "centred"]
"""How a norm rounds. RMSNorm casts, then weighs (Llama); does all in fp32 (Gemma); weighs in fp32, then casts
(OLMo 2). LayerNorm is torch's own (GPT-2) or written out in fp32 (Cohere)."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        table: names and shapes of its parameters.
        norms: where a layer normalises; ``shared`` acts only where the blocks are side by side.
        root: how its norms round.
        head_norm: what is normalised of queries and keys: nothing, each head, or all heads together.
        fused: whether queries, keys and values are one matrix.
        gated: whether the first matrix of the mlp has a gate beside it.
        parallel: whether attention and mlp work side by side; True, False, or the key that decides.
        biases: which of ``qkv``, ``out``, ``mlp``, ``norm``, ``head`` have biases, or the key that decides.
        scaled_embedding: whether embeddings are multiplied by a constant kept in a buffer.
        experts: the config keys (experts, width of one) of a mixture, None for a dense model.
        mixed_layers: whether layers may stay dense, as ``decoder_sparse_step`` and ``mlp_only_layers`` say.
        rounded_scores: whether the router's weights are cast to the training dtype before the experts.
        window_pattern: every n-th layer attends in full, the others in a window; 0 where all are alike.
        rotary: how much of each head rotates where the config may choose; None where it may not.
        learned_positions: whether positions are an embedding, and nothing rotates.
        rotary_per_kind: whether each kind of layer has its own rotary frequencies.
        softcap: the config key of the attention logits' cap.
        wide_rotary: whether cosines and sines are fp32 in every training dtype.
        widening: the mlp's width over the stream's where a config leaves it out; 0 where none may.
        keys: other names of config keys, tried first.
        ignored: common config keys that it does not read.
        unplanned: switches that change a layer in a way not written down here.
        defaults: values for optional keys.
    """

    table: Table
    norms: Norms = "before"
    root: Root = "cast"
    head_norm: Literal["none", "head", "all"] = "none"
    fused: bool = False
    gated: bool = True
    parallel: bool | str = False
    biases: Mapping[str, bool | str] = field(default_factory=dict)
    scaled_embedding: bool = False
    experts: tuple[tuple[str, ...], str] | None = None
    mixed_layers: bool = False
    rounded_scores: bool = False
    window_pattern: int = 0
    rotary: float | None = None
    learned_positions: bool = False
    rotary_per_kind: bool = False
    softcap: str | None = None
    wide_rotary: bool = False
    widening: int = 0
    keys: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


_ATTENTION = {"qkv": "attention_bias", "out": "attention_bias"}
_EVERYWHERE = dict.fromkeys(("qkv", "out", "mlp", "norm"), True)
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, Family] = {
    "llama": Family(parameters.LLAMA, biases={**_ATTENTION, "mlp": "mlp_bias"}),
    "mistral": Family(parameters.LLAMA, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": Family(parameters.LLAMA, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "granite": Family(parameters.LLAMA, biases={**_ATTENTION, "mlp": "mlp_bias"}),
    "qwen2": Family(parameters.LLAMA, biases={"qkv": True}, defaults={**_QWEN, "num_key_value_heads": 32}),
    "qwen3": Family(
        parameters.QWEN3,
        head_norm="head",
        biases=_ATTENTION,
        defaults={**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Family(
        parameters.LLAMA,
        root="float",
        biases=_ATTENTION,
        scaled_embedding=True,
        defaults={**_GEMMA, "num_key_value_heads": 16},
    ),
    "gemma2": Family(
        parameters.GEMMA2,
        norms="both",
        root="float",
        biases=_ATTENTION,
        scaled_embedding=True,
        window_pattern=2,
        softcap="attn_logit_softcapping",
        defaults={
            **_GEMMA,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        parameters.GEMMA3,
        norms="both",
        root="float",
        head_norm="head",
        biases=_ATTENTION,
        scaled_embedding=True,
        window_pattern=6,
        rotary_per_kind=True,
        unplanned=("use_bidirectional_attention",),
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "olmo2": Family(
        parameters.OLMO2, norms="after", root="mixed", head_norm="all", wide_rotary=True, biases=_ATTENTION
    ),
    "olmo3": Family(
        parameters.OLMO2,
        norms="after",
        root="mixed",
        head_norm="all",
        wide_rotary=True,
        biases=_ATTENTION,
        window_pattern=4,
        rotary_per_kind=True,
        defaults={"sliding_window": 4096},
    ),
    "phi": Family(
        parameters.PHI,
        norms="shared",
        root="layer",
        gated=False,
        parallel=True,
        biases={**_EVERYWHERE, "head": True},
        rotary=0.5,
        unplanned=("qk_layernorm",),
        defaults={"hidden_act": "gelu_new"},
    ),
    "phi3": Family(parameters.PHI3, fused=True, rotary=1.0),
    "gpt2": Family(
        parameters.GPT2,
        root="layer",
        gated=False,
        fused=True,
        biases=_EVERYWHERE,
        learned_positions=True,
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
        },
        widening=4,
        ignored=("head_dim", "num_key_value_heads", "intermediate_size"),
        unplanned=("add_cross_attention",),
        defaults={
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "hidden_act": "gelu_new",
            **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.1),
        },
    ),
    "gpt_neox": Family(
        parameters.GPT_NEOX,
        root="layer",
        gated=False,
        fused=True,
        parallel="use_parallel_residual",
        biases={**_EVERYWHERE, **_ATTENTION},
        rotary=0.25,
        ignored=("head_dim", "num_key_value_heads"),
        defaults={"use_parallel_residual": True, "attention_bias": True, "hidden_act": "gelu"},
    ),
    "stablelm": Family(
        parameters.STABLELM,
        norms="shared",
        root="layer",
        parallel="use_parallel_residual",
        biases={"qkv": "use_qkv_bias", "norm": True},
        rotary=0.25,
        ignored=("head_dim",),
        unplanned=("qk_layernorm",),
        defaults={"num_key_value_heads": 32},
    ),
    "starcoder2": Family(
        parameters.STARCODER2,
        root="layer",
        gated=False,
        biases={"qkv": "use_bias", "out": "use_bias", "mlp": "use_bias", "norm": True},
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "use_bias": True,
        },
    ),
    "cohere": Family(
        parameters.COHERE,
        norms="shared",
        root="centred",
        parallel=True,
        biases=_ATTENTION,
        unplanned=("use_qk_norm",),
        defaults={"tie_word_embeddings": True},
    ),
    "cohere2": Family(
        parameters.COHERE,
        norms="shared",
        root="centred",
        parallel=True,
        biases=_ATTENTION,
        window_pattern=4,
        defaults={"tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "mixtral": Family(
        parameters.MIXTRAL,
        experts=(("num_local_experts", "num_experts"), "intermediate_size"),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": Family(
        parameters.QWEN3_MOE,
        head_norm="head",
        biases=_ATTENTION,
        experts=(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        mixed_layers=True,
        rounded_scores=True,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "use_sliding_window": False,
        },
    ),
}
"""``model_type`` -> family."""
