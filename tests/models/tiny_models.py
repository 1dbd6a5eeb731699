"""Tiny random models of several families, built on the fly."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mistral-long-window": {"model_type": "mistral", "sliding_window": 64},
    "gemma2": {"model_type": "gemma2", "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 4},
}


def build(family, dtype=torch.float32, **overrides):
    """A model with random weights, not too small for attention to matter."""
    config = AutoConfig.for_model(**{**SMALL, **FAMILIES.get(family, {"model_type": family}), **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.config.architectures = [type(model).__name__]
    return model.eval()


def tiny_tokenizer():
    """Whole words: a, b, c, and <eos>; with a chat template."""
    words = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


def write_gguf(model, path, tokens=()):
    """A llama model as a GGUF file in fp32, as llama.cpp's converter writes it."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        data = parameter.detach()
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if projection in name:  # llama.cpp rotates neighbouring pairs instead of halves
                data = data.view(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(data.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
