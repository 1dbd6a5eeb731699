"""The decoder families that the planner knows: how transformers 5.24 builds and computes each of them.

Only what decides names, shapes and saved activations stands here. Defaults are those of transformers' own
config classes, for keys that a config.json may leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["before", "after", "both"]
"""Where a layer normalises: before its two blocks (Llama), after them (OLMo 2), or both (Gemma 2)."""

Root = Literal["cast", "float", "mixed"]
"""How RMSNorm rounds: casts, then weighs (Llama); all in fp32 (Gemma); weighs in fp32, then casts (OLMo)."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        norms: where a layer normalises.
        root: how its RMSNorm rounds.
        head_norm: what is normalised of queries and keys: nothing, each head, or all heads together.
        fused: whether queries, keys and values are one matrix, and gate and up another (Phi 3).
        qkv_bias, out_bias, mlp_bias: True, False, or the key of the config that decides.
        scaled_embedding: whether embeddings are multiplied by a constant.
        experts: the config keys (experts, width of one) of a mixture, None for a dense model.
        mixed_layers: whether layers may stay dense, as ``decoder_sparse_step`` and ``mlp_only_layers`` say.
        rounded_scores: whether the router's weights are cast to the training dtype before the experts.
        window_pattern: every n-th layer attends in full, the others in a window; 0 where all are alike.
        rotary_per_kind: whether each kind of layer has its own rotary frequencies.
        softcap: the config key of the attention logits' cap.
        wide_rotary: whether cosines and sines are fp32 in every training dtype.
        partial_rotary: whether the config may let only a part of each head rotate.
        defaults: values for optional keys.
    """

    norms: Norms = "before"
    root: Root = "cast"
    head_norm: Literal["none", "head", "all"] = "none"
    fused: bool = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    scaled_embedding: bool = False
    experts: tuple[tuple[str, ...], str] | None = None
    mixed_layers: bool = False
    rounded_scores: bool = False
    window_pattern: int = 0
    rotary_per_kind: bool = False
    softcap: str | None = None
    wide_rotary: bool = False
    partial_rotary: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_BIASED = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(defaults={"num_key_value_heads": 8}),
    "qwen2": Family(qkv_bias=True, defaults={"num_key_value_heads": 32}),
    "qwen3": Family(
        head_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Family(
        root="float",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        scaled_embedding=True,
        defaults={**_GEMMA, "num_key_value_heads": 16},
    ),
    "gemma2": Family(
        norms="both",
        root="float",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
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
        norms="both",
        root="float",
        head_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        scaled_embedding=True,
        window_pattern=6,
        rotary_per_kind=True,
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "olmo2": Family(
        norms="after",
        root="mixed",
        head_norm="all",
        wide_rotary=True,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "phi3": Family(fused=True, partial_rotary=True),
    "mixtral": Family(
        experts=(("num_local_experts", "num_experts"), "intermediate_size"),
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": Family(
        head_norm="head",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        experts=(("num_experts", "num_local_experts"), "moe_intermediate_size"),
        mixed_layers=True,
        rounded_scores=True,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
"""``model_type`` -> family."""
