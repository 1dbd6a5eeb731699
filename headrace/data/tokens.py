"""The few things asked of a tokenizer: ids in batches, offsets, its frame of special tokens, its identity."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import UserError

IdArray = npt.NDArray[np.int32]
Tokenizer = Any
"""A transformers tokenizer backed by the tokenizers library (``is_fast``)."""


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises UserError for a tokenizer without a fast backend or without an end-of-text token."""
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} has no fast version (tokenizer.json), which data needs")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token, with which documents end; name one in its config")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IdArray]:
    """Token ids of every text as it stands: nothing added, nothing cut."""
    if not texts:
        return []
    found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [np.asarray(ids, dtype=np.int32) for ids in found["input_ids"]]


class Encoding:
    """Token ids of one text, and the characters from which each comes.

    Attributes:
        ids: int32 [tokens].
        starts, ends: int64 [tokens], first character and one past the last; white space at a token's ends
            may be left out of its range.
    """

    def __init__(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        pairs = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        self.ids: IdArray = np.asarray(ids, dtype=np.int32)
        self.starts, self.ends = pairs[:, 0], pairs[:, 1]


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Like :func:`encode`, with the characters of every token."""
    if not texts:
        return []
    found = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    return [Encoding(*pair) for pair in zip(found["input_ids"], found["offset_mapping"], strict=True)]


def frame(tokenizer: Tokenizer) -> tuple[IdArray, IdArray]:
    """What stands before and after a document: the tokenizer's own special tokens, and always an EOS.

    Raises UserError for a tokenizer that can't even write the letter a.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    if not bare:
        raise UserError("the tokenizer has no token for the letter a; it was built from too little text")
    before = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    after = whole[before + len(bare) :]
    if tokenizer.eos_token_id not in after:
        after = [*after, tokenizer.eos_token_id]
    return np.asarray(whole[:before], dtype=np.int32), np.asarray(after, dtype=np.int32)


def identity(tokenizer: Tokenizer) -> str:
    """SHA-256 of everything that decides which ids a text gets, chat template and EOS included."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Truncation and padding are set by every call, and never used here.
    backend = {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
    parts = [backend, tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
