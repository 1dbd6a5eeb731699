"""How many rows there will be, from a sample of the files and without a tokenizer. No torch."""

import json
from dataclasses import dataclass
from itertools import islice

from headrace.data.config import DataConfig
from headrace.data.sources import Record, find_sources, read_records
from headrace.data.tally import Tally
from headrace.errors import UserError

CHARACTERS_A_TOKEN = 4.0
"""About what current tokenizers need for English text."""
_SAMPLE = 256
_FIELDS = ("text", "prompt", "completion")


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
    lengths = [max(1.0, _characters(record) / CHARACTERS_A_TOKEN) for record in records]
    documents = max(1, round(kept * scale * sum(-(-length // config.context) for length in lengths)))
    tokens = max(1, round(kept * scale * sum(lengths)))
    rows = min(documents, -(-tokens // config.context)) if config.packing else documents
    return Estimate(documents, tokens, max(1, rows))


def _characters(record: Record) -> int:
    messages = record.fields.get("messages")
    if messages is not None:
        return len(json.dumps(messages, ensure_ascii=False, default=str))
    return sum(len(record.fields[name]) for name in _FIELDS if isinstance(record.fields.get(name), str))
