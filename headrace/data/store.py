"""Tokenised documents in one memory-mapped Arrow file: written once, aside, then renamed."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.data.formats import Document, Mask
from headrace.data.packing import Indices
from headrace.data.tally import Tally
from headrace.data.tokens import IdArray
from headrace.errors import UserError

_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("trained", pa.list_(pa.bool_())),
        ("trained_tokens", pa.int32()),
    ]
)
_ROWS = "documents.arrow"
_SUMMARY = "summary.json"
_BATCH_TOKENS = 2**17


class Documents:
    """The documents of one source. Only lengths are held in memory.

    Attributes:
        key: the name of its directory.
        lengths: int64 [documents], tokens of each.
        trained_tokens: int64 [documents], tokens of each that are predicted and trained.
        tally: what became of the records.
    """

    def __init__(self, directory: Path) -> None:
        """Open what :func:`write` left in ``directory``."""
        self.key = directory.name
        self._dataset = datasets.Dataset.from_file(str(directory / _ROWS)).with_format("arrow")
        columns = self._dataset[:]
        self.lengths: Indices = pc.list_value_length(columns["input_ids"]).to_numpy().astype(np.int64)
        self.trained_tokens: Indices = columns["trained_tokens"].to_numpy().astype(np.int64)
        self.tally = Tally.from_json(json.loads((directory / _SUMMARY).read_text())["tally"])

    def __len__(self) -> int:
        return len(self.lengths)

    def largest_id(self) -> int:
        """The largest token id of all documents; every one is read for it."""
        return max(pc.max(chunk.flatten()).as_py() for chunk in self._dataset[:]["input_ids"].chunks)

    def fetch(self, indices: Sequence[int] | Indices) -> list[tuple[IdArray, Mask]]:
        """Ids and mask of trained tokens, both [tokens], of the documents in ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        table: pa.Table = self._dataset[chosen]
        ids, trained = (
            table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            for name in ("input_ids", "trained")
        )
        borders = np.cumsum(self.lengths[chosen])[:-1]
        return list(zip(np.split(ids, borders), np.split(trained, borders), strict=True))


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds a file as long as its summary says."""
    try:
        summary = json.loads((directory / _SUMMARY).read_text())
        return bool((directory / _ROWS).stat().st_size == summary["nbytes"])
    except (OSError, ValueError, KeyError):
        return False


def write(directory: Path, documents: Iterable[Document], tally: Tally) -> None:
    """Write every document and, at the end, the tally; ``directory`` appears only when all is on the disk.

    What a killed run left beside it is removed: one process prepares a directory at a time.

    Raises UserError when the disk is full.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in directory.parent.glob(f"{directory.name}.partial-*"):
        shutil.rmtree(stale)
    aside = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    aside.mkdir()
    try:
        _write_rows(aside / _ROWS, documents)
        summary = {"nbytes": (aside / _ROWS).stat().st_size, "tally": tally.to_json()}
        (aside / _SUMMARY).write_text(json.dumps(summary))
        for path in (aside / _ROWS, aside / _SUMMARY, aside):
            _sync(path)
        if directory.exists():
            shutil.rmtree(directory)
        aside.rename(directory)
        _sync(directory.parent)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"no space is left on the disk of {directory.parent} for tokenised data") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_rows(path: Path, documents: Iterable[Document]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for batch in _batches(documents):
            rows = [
                {"input_ids": d.ids, "trained": d.trained, "trained_tokens": d.trained_tokens} for d in batch
            ]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, _SCHEMA))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    tokens = 0
    for document in documents:
        batch.append(document)
        tokens += len(document.ids)
        if tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
