"""Text from a model: the answer to a message, or the continuation of a text."""

from typing import Any

import torch

from headrace.errors import UserError
from headrace.models.load import LoadedModel, load_model


def answer(source: str, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """What a model answers to ``prompt`` (with its chat template), or how it continues it (without one).

    Args:
        source: a Hugging Face directory or a .gguf file.
        tokens: most tokens to write.
        temperature: 0 takes the likeliest token each time.
        seed: of the random choice.

    Raises:
        UserError: no such model, a model without tokenizer, an empty prompt.
    """
    loaded = load_model(source, torch.float32, device=torch.device("cpu"))
    if loaded.tokenizer is None:
        raise UserError(f"{source} holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it")
    return generate(loaded, prompt, tokens=tokens, temperature=temperature, seed=seed)


def generate(
    loaded: LoadedModel, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0
) -> str:
    """As :func:`answer`, with a model that is already loaded; it is left in evaluation mode."""
    tokenizer, model = loaded.tokenizer, loaded.model
    assert tokenizer is not None, "a model to sample from needs a tokenizer"
    inputs = _encode(tokenizer, prompt)
    if inputs["input_ids"].shape[1] == 0:
        raise UserError("the prompt is empty: give at least one word")
    model.eval()
    training_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # ours has no cache of keys and values
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        chosen["temperature"] = temperature
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id, use_cache=True, **chosen
        )
    model.set_attn_implementation(training_attention)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _encode(tokenizer: Any, prompt: str) -> dict[str, torch.Tensor]:
    if not tokenizer.chat_template:
        return dict(tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))
    messages = [{"role": "user", "content": prompt}]
    return dict(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    )
