"""The micro-batch: rows of documents as tensors.

Shapes: B rows of the micro-batch, L tokens of its longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.memory.shapes import round_length

IGNORED = -100
"""The label of a position that isn't trained, as in torch's cross-entropy."""

TokenRow = Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]
"""The documents of one row: ids and the mask of trained tokens, both [tokens]."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward works on. CPU tensors.

    Attributes:
        input_ids_BL: int64; 0 in the padding at a row's end.
        labels_BL: int64, already shifted: the token to predict at each position, or -100. The last position
            of a document is always -100.
        position_ids_BL: int64, counted from each document's start; 0 in the padding.
        documents: (row, start, stop) of every document, row by row; padding belongs to none.
        valid_tokens: how many labels aren't -100.
    """

    input_ids_BL: torch.Tensor
    labels_BL: torch.Tensor
    position_ids_BL: torch.Tensor
    documents: tuple[tuple[int, int, int], ...]
    valid_tokens: int


def collate(rows: Sequence[TokenRow], limit: int) -> MicroBatch:
    """Lay each row's documents one behind the other; rows are padded to a round length.

    Args:
        limit: tokens of the longest row there is; no row is padded beyond it.
    """
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    ids_BL = np.zeros((len(rows), min(round_length(longest), limit)), dtype=np.int64)
    labels_BL = np.full_like(ids_BL, IGNORED)
    positions_BL = np.zeros_like(ids_BL)
    documents = []
    for number, row in enumerate(rows):
        start = 0
        for ids, trained in row:
            stop = start + len(ids)
            ids_BL[number, start:stop] = ids
            labels_BL[number, start : stop - 1] = np.where(trained[1:], ids[1:], IGNORED)
            positions_BL[number, start:stop] = np.arange(len(ids))
            documents.append((number, start, stop))
            start = stop
    return MicroBatch(
        input_ids_BL=torch.from_numpy(ids_BL),
        labels_BL=torch.from_numpy(labels_BL),
        position_ids_BL=torch.from_numpy(positions_BL),
        documents=tuple(documents),
        valid_tokens=int((labels_BL != IGNORED).sum()),
    )
