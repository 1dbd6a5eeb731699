"""Rows as people read them: the text of every document, with what is trained told from what is not.

Shapes: B rows, L positions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from headrace.data.batch import IGNORED, MicroBatch
from headrace.data.tokens import Tokenizer

_UNPRINTABLE = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}
"""What a terminal would obey instead of showing it."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of a document that are all trained, or all not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Page:
    """A document in a row.

    Attributes:
        tokens: how many it has.
        trained: how many of them the model is taught to predict.
        pieces: its text.
    """

    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


def render(batch: MicroBatch, tokenizer: Tokenizer) -> list[list[Page]]:
    """Every document of every row of a micro-batch, exactly as the model gets it: ids, borders and labels."""
    rows: list[list[Page]] = [[] for _ in range(len(batch.input_ids_BL))]
    for row, start, stop in batch.documents:
        # The label at a position is the next token; a document's first token is predicted by none.
        predicted = batch.labels_BL[row, start : stop - 1] != IGNORED
        trained = torch.cat([predicted.new_zeros(1), predicted]).numpy()
        pieces = tuple(_pieces(batch.input_ids_BL[row, start:stop].tolist(), trained, tokenizer))
        rows[row].append(Page(stop - start, int(trained.sum()), pieces))
    return rows


def _pieces(ids: Sequence[int], trained: np.ndarray, tokenizer: Tokenizer) -> Iterator[Piece]:
    borders = [0, *(int(place) + 1 for place in np.flatnonzero(trained[1:] != trained[:-1])), len(ids)]
    done = ""
    for start, stop in pairwise(borders):
        # Decoded alone, a piece would lose the space at its start with some tokenizers.
        whole = _decode(tokenizer, ids[:stop])
        text = whole[len(done) :] if whole.startswith(done) else _decode(tokenizer, ids[start:stop])
        done = whole
        yield Piece(text.translate(_UNPRINTABLE), bool(trained[start]))


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
