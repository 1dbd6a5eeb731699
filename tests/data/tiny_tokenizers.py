"""Small tokenizers, built in memory from a few sentences, with the traits of real ones."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SENTENCES = [
    "The headrace brings the water to the mill wheel, so that the wheel never stops.",
    "What is a headrace?\nIt is a channel.\n\nAnd a tailrace?  That one leads the water away.",
    "user\nassistant\nsystem\nYou are a helpful assistant.\n",
    "numbers: 1 2 3, 1024 and 65536; Größe, naïve, 水車 and 🎡",
] * 4

# SmolLM2's: a conversation without a system message gets one.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like templates of reasoning models: the last answer is written in another way than the ones before it.
LAST_DIFFERS = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '(thought)' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No special tokens around messages: every border must be checked against the whole beginning.
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
)


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer.to_str()


def byte_level(template: str | None = SMOLLM) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as in GPT-2, SmolLM2, Llama 3 and Qwen; it adds nothing to a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level()), eos_token="<|im_end|>", chat_template=template
    )


@cache
def _metaspace() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>", *SPECIAL]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=[*special, *fallback], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer.to_str()


def metaspace(template: str | None = SMOLLM) -> PreTrainedTokenizerFast:
    """BPE over whole texts with ``▁`` for spaces and a BOS in front, as in Llama 2 and Mistral."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_metaspace()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
