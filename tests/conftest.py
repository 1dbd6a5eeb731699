"""Settings that must stand before torch is imported; a tiny model, a tokenizer and chats for whole runs."""

from headrace.memory.process import prepare_process

prepare_process()

import json  # noqa: E402
import multiprocessing  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import LlamaConfig, PreTrainedTokenizerFast  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
WORDS = ["water", "mill", "wheel", "channel", "river", "pond", "sluice", "stone", "grain", "flour", "gate"]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}


def chats(count):
    for number in range(count):
        picked = [WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(3 + number % 9)]
        question, answer = " ".join(picked[:3]), " ".join(reversed(picked))
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A directory with model/ (config and tokenizer, so weights are drawn at random) and chats.jsonl."""
    home = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATE)
    fast.save_pretrained(home / "model")
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(home / "model")
    lines = "".join(json.dumps(chat) + "\n" for chat in chats(60))
    (home / "chats.jsonl").write_text(lines, encoding="utf-8")
    return home


@pytest.fixture
def write_run(tiny, tmp_path):
    """Writes a run file with the given values (``section__key=value``) and returns its path."""

    def write(name="run", **values):
        run = {
            "model": {"path": str(tiny / "model" / "config.json"), "dtype": "bf16"},
            "data": {"train": str(tiny / "chats.jsonl"), "eval": 0.1, "context": 64},
            "train": {"steps": 8, "batch": 4, "micro_batch": 2, "eval_every": 3},
            "optim": {"lr": 1e-2, "max_grad_norm": 0.3},
            "memory": {"host": "4GiB"},
            "checkpoint": {"every": 2, "keep": 2},
            "threads": {"compute": 1, "update": 2},
            "out": str(tmp_path / name),
        }
        for key, value in values.items():
            section, _, inner = key.partition("__")
            if inner:
                run.setdefault(section, {})[inner] = value
            else:
                run[section] = value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(run), encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def own_threads():
    """A run sets torch's threads for its whole process; the tests after it keep theirs."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def processes():
    """Processes that start with everything imported, for runs that are killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.run.train"])
    return context
