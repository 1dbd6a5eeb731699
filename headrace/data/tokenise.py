"""From files to tokenised documents: read, encode, bring to length, store under a key, find again."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from headrace.data.chat import ChatEncoder
from headrace.data.config import DataConfig, Format, LossOn, resolve_loss
from headrace.data.formats import CompletionEncoder, Document, Encoder, TextEncoder, detect_format
from headrace.data.sources import Record, Sources, digest, find_sources, read_records
from headrace.data.store import Documents, is_complete, write
from headrace.data.tally import Tally
from headrace.data.tokens import Tokenizer, identity
from headrace.errors import UserError

_LAYOUT = 1  # part of every key; raise it when the same files would give other documents
_BATCH_BYTES = 2**18
_BATCH_RECORDS = 1024

Progress = Callable[[int, int], None]
"""Called with the bytes of the sources done, and the bytes of all of them."""


def tokenise(
    key: str,
    given: str | list[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    directory: Path,
    on_progress: Progress | None = None,
    earlier: Path | None = None,
    vocabulary: int | None = None,
) -> Documents:
    """The documents of the files that ``given`` names, as the run file's ``key`` does.

    They are written to a directory of their own below ``directory``, named by the files' bytes, the settings
    and the tokenizer; what is there already, or in ``earlier``, is used.

    Raises UserError for what :func:`headrace.data.prepare.prepare` lists.
    """
    sources = find_sources(given, key)
    name = _key(sources, config, tokenizer)
    home = directory / name
    if earlier is not None and is_complete(earlier / name):
        home = earlier / name
    if not is_complete(home):
        tally = Tally(config.bad_records)
        read = _documents(sources, config, tokenizer, tally, on_progress or (lambda done, total: None))
        write(home, _at_least_one(read, key, config.context, tally), tally)
    documents = Documents(home)
    if vocabulary is not None:
        _check_ids(documents, tokenizer, vocabulary, key)
    return documents


def _check_ids(documents: Documents, tokenizer: Tokenizer, vocabulary: int, key: str) -> None:
    """Raise UserError for a token that the model has no row for; reading all is rarely needed to know."""
    if max(tokenizer.get_vocab().values()) < vocabulary:
        return
    if (largest := documents.largest_id()) >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise UserError(
            f"{key} has the token {token!r} of id {largest}, but the model only {vocabulary:,} rows "
            "(vocab_size): give the model its own tokenizer, or leave the token out of data and chat template"
        )


def _key(sources: Sources, config: DataConfig, tokenizer: Tokenizer) -> str:
    digests = [digest(path) for path in sources.files]
    settings = config.model_dump(include={"format", "loss_on", "context", "over_long", "bad_records"})
    parts = [_LAYOUT, sources.kind, digests, settings, identity(tokenizer)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _documents(
    sources: Sources, config: DataConfig, tokenizer: Tokenizer, tally: Tally, on_progress: Progress
) -> Iterator[Document]:
    records = read_records(sources, tally)
    format, first = _format(sources, config, records, tally)
    if first is None:
        return
    encoder = make_encoder(format, _loss(format, config), tokenizer)
    documents = _encoded(encoder, chain([first], records), sources.nbytes, tally, on_progress)
    if format == "text":
        yield from _divided(documents, config.context, tally)
    else:
        for document in documents:
            yield from _fitted(document, config, tally)


def _encoded(
    encoder: Encoder, records: Iterator[Record], total: int, tally: Tally, on_progress: Progress
) -> Iterator[Document]:
    done = 0
    for batch in _batches(records):
        yield from encoder.encode(batch, tally)
        done += sum(record.nbytes for record in batch)
        on_progress(done, total)


def _format(
    sources: Sources, config: DataConfig, records: Iterator[Record], tally: Tally
) -> tuple[Format, Record | None]:
    """The format, and the first record that has one; records before it are rejected."""
    if sources.kind == "text" and config.format not in ("auto", "text"):
        path = sources.files[0]
        raise UserError(
            f"data.format={config.format} needs JSON or Parquet records, and {path} is plain text"
        )
    if config.format != "auto":
        return config.format, next(records, None)
    for record in records:
        if (format := detect_format(record, tally)) is not None:
            return format, record
    return "text", None


def _loss(format: Format, config: DataConfig) -> LossOn:
    try:
        return resolve_loss(format, config.loss_on)
    except ValueError as error:
        raise UserError(str(error)) from error


def make_encoder(format: Format, loss_on: LossOn, tokenizer: Tokenizer) -> Encoder:
    """The encoder of ``format``.

    Raises UserError when the tokenizer can't serve it.
    """
    if format == "text":
        return TextEncoder(tokenizer)
    if format == "completion":
        return CompletionEncoder(tokenizer, loss_on)
    return ChatEncoder(tokenizer, loss_on, format)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    nbytes = 0
    for record in records:
        batch.append(record)
        nbytes += record.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _divided(blocks: Iterable[Document], context: int, tally: Tally) -> Iterator[Document]:
    """Texts in pieces of ``context`` tokens, their last pieces shorter; no token is lost."""
    rest: Document | None = None
    for block in blocks:
        text = block if rest is None else rest.joined(block)
        whole = block.record.first and block.record.last
        if whole and not text.trained_tokens:
            tally.reject(block.record.place, "has nothing to train on")
            continue
        stop = len(text.ids) if block.record.last else len(text.ids) // context * context
        yield from (text.part(start, min(stop, start + context)) for start in range(0, stop, context))
        rest = None if block.record.last else text.part(stop, len(text.ids))
        tally.records += block.record.last


def _fitted(document: Document, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """``document`` if it fits the context and trains anything, or what the switches make of it."""
    length, context, place = len(document.ids), config.context, document.record.place
    if length > context and config.over_long == "error":
        raise UserError(
            f"{place} has {length:,} tokens, more than data.context={context}; "
            "raise data.context, or set data.over_long to cut or skip"
        )
    kept = document.part(0, context)
    # A cut that leaves nothing to train on is a record left out.
    if length > context and (config.over_long == "skip" or not kept.trained_tokens):
        tally.over_long += 1
    elif not kept.trained_tokens:
        tally.reject(place, "has nothing to train on")
    else:
        tally.cut += length > context
        tally.records += 1
        yield kept


def _at_least_one(documents: Iterator[Document], key: str, context: int, tally: Tally) -> Iterator[Document]:
    first = next(documents, None)
    if first is None:
        reason = "; ".join(tally.remarks(context)) or "there is nothing in its files"
        raise UserError(f"{key} holds no document to train on: {reason}")
    yield first
    yield from documents
