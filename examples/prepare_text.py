"""Writes what `examples/text.yaml` trains on: Python's own manual pages, and a tokenizer learned from them.

    python examples/prepare_text.py [DIRECTORY]

DIRECTORY (runs/text-example by default) then holds `pages/*.txt`, one document each, and `model/`, a
config.json of 4.7 million parameters with its tokenizer. Nothing is downloaded.
"""

import json
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"
CONFIG = Path(__file__).parent / "tiny-llama" / "config.json"


def write_pages(directory: Path) -> list[str]:
    """Write every help topic as one file of its own; return the texts."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (directory / f"{name}.txt").write_text(text, encoding="utf-8")
    return list(topics.values())


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with `vocabulary` tokens; the end-of-document token is number 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(directory: Path) -> None:
    """Write pages and model directory below `directory`."""
    texts = write_pages(directory / "pages")
    model = directory / "model"
    model.mkdir(exist_ok=True)
    shutil.copy(CONFIG, model)
    vocabulary = json.loads(CONFIG.read_text(encoding="utf-8"))["vocab_size"]
    train_tokenizer(texts, vocabulary).save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print(f"{len(texts)} pages in {directory / 'pages'}, model and tokenizer in {model}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/text-example"))
