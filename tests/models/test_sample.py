"""Sampling from a model that is set up for training."""

import pytest
import torch
from tiny_models import build, tiny_tokenizer

from headrace.errors import UserError
from headrace.models.attention import attach
from headrace.models.load import LoadedModel
from headrace.models.sample import generate

TOKENS = 6


def likeliest(model, input_ids_1L):
    """What follows, by whole forward passes with transformers' own attention."""
    model.set_attn_implementation("eager")
    prompt = input_ids_1L.shape[1]
    with torch.no_grad():
        for _ in range(TOKENS):
            logits_1LV = model(input_ids_1L, use_cache=False).logits
            input_ids_1L = torch.cat([input_ids_1L, logits_1LV[:, -1:].argmax(-1)], dim=1)
    return input_ids_1L[0, prompt:]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "phi", "stablelm", "mixtral"])
def test_the_likeliest_tokens_come_and_training_goes_on(family):
    model, tokenizer = build(family, vocab_size=4), tiny_tokenizer()
    model.generation_config.eos_token_id = None
    attach(model)
    prompt = "a b a c"
    input_ids_1L = tokenizer(prompt, return_tensors="pt")["input_ids"]
    text = generate(LoadedModel(model, tokenizer), prompt, tokens=TOKENS)
    assert model.config._attn_implementation == "headrace"
    assert text == tokenizer.decode(likeliest(model, input_ids_1L), skip_special_tokens=True).strip()


def test_an_empty_prompt_is_refused():
    model, tokenizer = build("llama", vocab_size=4), tiny_tokenizer()
    tokenizer.chat_template = None
    attach(model)
    with pytest.raises(UserError, match="the prompt is empty"):
        generate(LoadedModel(model, tokenizer), "", tokens=1)
