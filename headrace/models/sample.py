"""Text from a model: the answer to a message, or the continuation of a text."""

from typing import Any

import torch
from transformers import PreTrainedModel

from headrace.errors import UserError, reason
from headrace.models.adapter import load_adapter
from headrace.models.finite import not_finite
from headrace.models.load import LoadedModel, load_model
from headrace.models.source import is_adapter


def answer(source: str, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """What a model answers to ``prompt`` (with its chat template), or how it continues it (without one).

    Args:
        source: a Hugging Face directory, one with an adapter of PEFT, or a .gguf file.
        tokens: most tokens to write.
        temperature: 0 takes the likeliest token each time.
        seed: of the random choice.

    Raises:
        UserError: no such model, weights that are not finite, a model without tokenizer, settings or a chat
            template that cannot be used, a prompt that is empty, too long or holds what the model lacks.
    """
    load = load_adapter if is_adapter(source) else load_model
    loaded = load(source, torch.float32, device=torch.device("cpu"))
    if loaded.tokenizer is None:
        raise UserError(f"{source} holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it")
    if name := not_finite(loaded.model):
        raise UserError(f"{name} of {source} is not finite: its training failed, take an earlier model")
    return generate(loaded, prompt, tokens=tokens, temperature=temperature, seed=seed)


def generate(
    loaded: LoadedModel, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0
) -> str:
    """As :func:`answer`, with a model that is already loaded; it is left in evaluation mode."""
    tokenizer, model = loaded.tokenizer, loaded.model
    assert tokenizer is not None, "a model to sample from needs a tokenizer"
    inputs = _encode(tokenizer, prompt)
    _check_prompt(inputs["input_ids"], loaded)
    model.eval()
    training_attention = model.config._attn_implementation
    # Ours has no cache of keys and values; Gemma 2's scores are capped, which sdpa cannot do.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        chosen["temperature"] = temperature
    chosen |= {"use_cache": True, "return_dict_in_generate": False, "pad_token_id": tokenizer.eos_token_id}
    prompt_length = inputs["input_ids"].shape[1]
    room = _positions(model) - prompt_length
    try:
        with torch.no_grad():
            output_1L = model.generate(**inputs, max_new_tokens=min(tokens, room), **chosen)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UserError(
            f"the model cannot write as its generation_config.json says ({reason(error)}): correct that "
            "file, or delete it"
        ) from error
    finally:
        model.set_attn_implementation(training_attention)
    return tokenizer.decode(output_1L[0, prompt_length:], skip_special_tokens=True).strip()


def _encode(tokenizer: Any, prompt: str) -> dict[str, torch.Tensor]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not UTF-8 text: give it in the encoding of your terminal") from error
    if not tokenizer.chat_template:
        return dict(tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))
    messages = [{"role": "user", "content": prompt}]
    try:
        return dict(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        )
    except Exception as error:  # a template is a program, and can fail as any other
        raise UserError(
            f"the model's chat template cannot be used ({reason(error)}): correct chat_template.jinja, or "
            "fetch it again"
        ) from error


def _check_prompt(input_ids_1L: torch.Tensor, loaded: LoadedModel) -> None:
    if input_ids_1L.shape[1] == 0:
        raise UserError("the prompt is empty: give at least one word")
    if input_ids_1L.shape[1] >= (positions := _positions(loaded.model)):
        raise UserError(
            f"the prompt has {input_ids_1L.shape[1]:,} tokens, which leaves no room in the {positions:,} "
            "positions that the model was made for: shorten it"
        )
    rows, largest = loaded.model.get_input_embeddings().weight.shape[0], int(input_ids_1L.max())
    if largest >= rows:
        assert loaded.tokenizer is not None
        token = loaded.tokenizer.convert_ids_to_tokens(largest)
        raise UserError(
            f"the prompt becomes the token {token!r} of id {largest}, but the model has only {rows:,} rows "
            "(vocab_size): leave it out of the prompt and the chat template"
        )


def _positions(model: PreTrainedModel) -> int:
    """Tokens that prompt and answer may have together."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
