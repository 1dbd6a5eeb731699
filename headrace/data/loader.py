"""The resumable loader: a step's micro-batches are a pure function of its index."""

from collections.abc import Iterator

import numpy as np

from headrace.data.batch import MicroBatch, collate
from headrace.data.packing import Indices, Purpose, Rows, permutation
from headrace.data.store import Documents


class Loader:
    """Rows, shuffled anew in every epoch, in steps of ``batch`` rows and micro-batches of ``micro_batch``.

    It has no position: ``step(index)`` gives the same micro-batches in any process, before or after any
    other. The last step of an epoch holds what is left and may be smaller, as may a step's last micro-batch.

    Attributes:
        batch: rows a step over all ranks.
        micro_batch: rows a micro-batch.
        longest_row: tokens of the longest row; no micro-batch is longer.
    """

    def __init__(self, documents: Documents, rows: Rows, *, batch: int, micro_batch: int, seed: int) -> None:
        assert len(rows) > 0 and batch > 0 and micro_batch > 0, (len(rows), batch, micro_batch)
        self._documents = documents
        self._rows = rows
        self._seed = seed
        self.batch = batch
        self.micro_batch = micro_batch
        lengths = documents.lengths[rows.documents]
        self.longest_row = int(np.add.reduceat(lengths, rows.starts[:-1]).max())

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    @property
    def documents(self) -> int:
        """Documents of an epoch."""
        return len(self._rows.documents)

    @property
    def tokens(self) -> int:
        """Tokens of an epoch, without padding."""
        return int(self._documents.lengths[self._rows.documents].sum())

    @property
    def trained_tokens(self) -> int:
        """Valid tokens of an epoch: the sum of its micro-batches'."""
        return int(self._documents.trained_tokens[self._rows.documents].sum())

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every row is seen once."""
        return -(-self.rows // self.batch)

    def step(self, index: int) -> list[MicroBatch]:
        """The micro-batches of optimizer step ``index``, counted from 0 over all epochs."""
        epoch, place = divmod(index, self.steps_per_epoch)
        order = permutation(self.rows, Purpose.SHUFFLE, self._seed, epoch)
        chosen = order[place * self.batch : (place + 1) * self.batch]
        return list(self._micro_batches(chosen))

    def in_order(self) -> Iterator[MicroBatch]:
        """Every row once, unshuffled, as evaluation wants them."""
        return self._micro_batches(np.arange(self.rows))

    def _micro_batches(self, chosen: Indices) -> Iterator[MicroBatch]:
        for start in range(0, len(chosen), self.micro_batch):
            yield self._micro_batch(chosen[start : start + self.micro_batch])

    def _micro_batch(self, chosen: Indices) -> MicroBatch:
        members = [self._rows[row] for row in chosen]
        found = iter(self._documents.fetch(np.concatenate(members)))
        return collate([[next(found) for _ in row] for row in members], self.longest_row)
