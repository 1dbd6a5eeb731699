"""Tiny configs of every family that the planner knows, of odd sizes so that no two terms look alike."""

from typing import Any

BASE = {
    "vocab_size": 101,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": None},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3 with a window": {
        "model_type": "qwen3",
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "gemma": {"model_type": "gemma", "head_dim": 12},
    "gemma2": {"model_type": "gemma2", "head_dim": 12, "sliding_window": 9},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 3,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4},
    "ministral": {"model_type": "ministral", "head_dim": 12, "sliding_window": 9},
    "granite": {"model_type": "granite", "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.4},
    "gpt2": {"model_type": "gpt2", "max_position_embeddings": 37, **NO_DROPOUT},
    "gpt2 untied": {
        "model_type": "gpt2",
        "max_position_embeddings": 37,
        "n_inner": 56,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
        **NO_DROPOUT,
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.4},
    "gpt_neox in sequence": {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "partial_rotary_factor": 0.4},
    "stablelm in parallel": {
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.4,
    },
    "starcoder2": {"model_type": "starcoder2"},
    "starcoder2 without biases": {"model_type": "starcoder2", "use_bias": False, "sliding_window": 9},
    "cohere": {"model_type": "cohere"},
    "cohere with biases": {"model_type": "cohere", "attention_bias": True, "head_dim": 12},
    "cohere2": {"model_type": "cohere2", "sliding_window": 9, "num_hidden_layers": 5},
    "phi3 with a window": {"model_type": "phi3", "sliding_window": 9},
    "phi3": {
        "model_type": "phi3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3},
    "mixtral, balanced": {
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "output_router_logits": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe, scores as they come": {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "head_dim": 12,
    },
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of one of the tiny models."""
    return {**BASE, **CONFIGS[name], **changes}
