"""Which documents share a row: pure functions of the lengths; the same seed gives the same rows."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Purpose(IntEnum):
    """What a random order is for, so that orders of the same seed don't repeat one another."""

    PACKING = 1
    SPLIT = 2
    SHUFFLE = 3


@dataclass(frozen=True)
class Rows:
    """Documents by row: row r holds ``documents[starts[r]:starts[r + 1]]``.

    Attributes:
        documents: int64 [documents], each index once.
        starts: int64 [rows + 1].
    """

    documents: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Indices:
        return self.documents[self.starts[row] : self.starts[row + 1]]


def permutation(count: int, purpose: Purpose, *seed: int) -> Indices:
    """A random order of ``range(count)``; for the same purpose and seed the same in every version of numpy.

    It sorts the raw stream of a Philox generator, which numpy guarantees, where ``Generator.permutation`` may
    change between versions.
    """
    raw = np.random.Philox(np.random.SeedSequence([purpose, *seed])).random_raw(count)
    return np.argsort(raw, kind="stable")


def one_each(count: int) -> Rows:
    """Every document in a row of its own."""
    return Rows(np.arange(count), np.arange(count + 1))


def pack(lengths: Indices, context: int, seed: int) -> Rows:
    """Rows of at most ``context`` tokens, by best fit decreasing (Johnson 1973).

    Long documents are placed first, each into the row where it leaves the least space; ``seed`` decides among
    equals. At most 11/9 of the least possible number of rows, and in practice within a few per cent.
    """
    assert len(lengths) == 0 or (lengths.min() > 0 and lengths.max() <= context), "documents must fit a row"
    row_of = np.empty(len(lengths), dtype=np.int64)
    # Rows by free space, and the free spaces that occur as the bits of one integer: the best fit is its
    # lowest bit at or above the length.
    rows_with: list[list[int]] = [[] for _ in range(context + 1)]
    spaces = rows = 0
    shuffled = permutation(len(lengths), Purpose.PACKING, seed)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[space].pop()
            spaces ^= 0 if rows_with[space] else 1 << space
        else:
            space, row, rows = context, rows, rows + 1
        row_of[document] = row
        rows_with[space - length].append(row)
        spaces |= 1 << (space - length)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return Rows(np.argsort(row_of, kind="stable"), starts)
