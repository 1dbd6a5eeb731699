"""How many rows there will be, from a sample of the files and without a tokenizer. No torch."""

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headrace.data.config import DataConfig, Format
from headrace.data.formats import detect_format
from headrace.data.sources import Record, find_sources, read_records
from headrace.data.tally import Tally
from headrace.errors import UserError

CHARACTERS_A_TOKEN = 4.0
"""About what current tokenizers need for English text."""
_SAMPLE = 256
_FIELDS: dict[Format, tuple[str, ...]] = {
    "text": ("text",),
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "alpaca": ("system", "history", "instruction", "input", "output"),
    "sharegpt": ("system", "conversations"),
}


@dataclass(frozen=True)
class Estimate:
    """Training data in round figures; exact ones are known once it is tokenised."""

    documents: int
    tokens: int
    rows: int


def estimate(config: DataConfig) -> Estimate:
    """Figures of the training files, read from their first records; flawed records count for nothing.

    Raises UserError for files that are missing, unreadable or without a record.
    """
    sources = find_sources(config.train, "data.train")
    records = list(islice(read_records(sources, Tally("skip")), _SAMPLE))
    if not records:
        raise UserError(f"data.train={config.train} holds no record")
    scale = sources.nbytes / sum(record.nbytes for record in records)
    kept = 1 - config.eval if isinstance(config.eval, float) else 1.0
    fields = _fields(config, records)
    lengths = [max(1.0, _characters(record, fields) / CHARACTERS_A_TOKEN) for record in records]
    documents = max(1, round(kept * scale * sum(-(-length // config.context) for length in lengths)))
    tokens = max(1, round(kept * scale * sum(lengths)))
    rows = min(documents, -(-tokens // config.context)) if config.packing else documents
    return Estimate(documents, tokens, max(1, rows))


def _fields(config: DataConfig, records: list[Record]) -> tuple[str, ...]:
    """The fields that hold what is tokenised."""
    if config.format != "auto":
        return _FIELDS[config.format]
    formats = (detect_format(record, Tally("skip")) for record in records)
    return next((_FIELDS[format] for format in formats if format is not None), ())


def _characters(record: Record, fields: tuple[str, ...]) -> int:
    held = (record.fields[name] for name in fields if record.fields.get(name) is not None)
    return sum(len(each) if isinstance(each, str) else _written(each) for each in held)


def _written(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str))
