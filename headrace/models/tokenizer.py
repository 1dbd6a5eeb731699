"""The tokenizer beside a model: read without running code of its own, and held against the model's rows."""

import mmap
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headrace.errors import UserError, reason
from headrace.models.quiet import quiet
from headrace.models.source import find_source, read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_JSON_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "config.json"),
)
_TEMPLATE = "chat_template.jinja"


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model's weights or inside its GGUF file; None when there is none.

    Raises UserError for one that cannot be read, or that needs code from its own repository.
    """
    source = find_source(path)
    options: dict[str, Any] = {}
    if source.kind == "gguf":
        if not _has_gguf_tokenizer(source.path):
            return None
        options["gguf_file"] = source.path.name
    return tokenizer_in(source.directory, **options)


def tokenizer_in(directory: Path, **options: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a directory; None when there is none. Raises as :func:`load_tokenizer` does."""
    named = "gguf_file" in options or any((directory / name).is_file() for name in _TOKENIZER_FILES)
    if not named:
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:  # whatever its many readers raise: none of them says which file is to blame
        raise UserError(_blamed(directory, error)) from error


def no_tokenizer(path: str | Path) -> UserError:
    """What to raise where training needs the tokenizer that :func:`load_tokenizer` did not find."""
    source = find_source(path)
    fetch = "copy tokenizer.json and tokenizer_config.json there"
    if source.hub is not None:
        fetch = f"{source.hub.command} fetches it"
    return UserError(f"{path} has no tokenizer beside it: {fetch}")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, path: str | Path) -> None:
    """Raise UserError when texts can have tokens for which the model's embedding, of ``rows``, has no row.

    Added tokens may lie beyond: the text models of Gemma 3 have none for its picture token. Who uses a
    tokenizer must look at the ids that come out of it.
    """
    added = tokenizer.added_tokens_decoder.keys() - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    beyond = {n: token for token, n in tokenizer.get_vocab().items() if n >= rows and n not in added}
    if beyond:
        number = max(beyond)
        raise UserError(
            f"{path}: its tokenizer has the token {beyond[number]!r} of id {number}, but the model only "
            f"{rows:,} rows (vocab_size): give it its own tokenizer, or from scratch a larger vocab_size"
        )


def _has_gguf_tokenizer(file: Path) -> bool:
    """Whether the metadata, which stand before the tensors, have the key; parsing them takes seconds."""
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"tokenizer.ggml.tokens") >= 0


def _blamed(directory: Path, error: Exception) -> str:
    """What to say of a tokenizer that cannot be read; raises UserError where a file of it is no JSON."""
    found = {name: read_json(directory / name) for name in _JSON_FILES if (directory / name).is_file()}
    template = directory / _TEMPLATE
    try:
        if template.is_file():
            template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as unreadable:
        return f"{template} cannot be read as UTF-8 text ({reason(unreadable)}): fetch it again"
    if any(settings.get("auto_map") for settings in found.values()):
        return (
            f"{directory}: its tokenizer needs code from its own repository (auto_map), which is never run; "
            "give a model whose tokenizer is a tokenizer.json"
        )
    return (
        f"{directory}: its tokenizer cannot be read ({reason(error)}): fetch tokenizer.json and "
        "tokenizer_config.json again"
    )
