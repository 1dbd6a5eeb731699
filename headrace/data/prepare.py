"""From a DataConfig and a tokenizer to loaders: tokenise once, split, pack, report."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from headrace.data.config import DataConfig
from headrace.data.loader import Loader
from headrace.data.packing import Indices, Purpose, Rows, one_each, pack, permutation
from headrace.data.sources import find_sources
from headrace.data.store import Documents
from headrace.data.tally import Tally
from headrace.data.tokenise import Progress, tokenise
from headrace.data.tokens import Tokenizer, check_tokenizer
from headrace.errors import UserError


@dataclass(frozen=True)
class Part:
    """What training or evaluation draws from: the loader, and what became of the records behind it.

    ``tally`` is None for a share held out of the training records, whose tally stands with training.
    """

    name: str
    loader: Loader
    context: int
    tally: Tally | None

    def lines(self) -> list[str]:
        """One line of counts, and one more where there is something to remark."""
        loader, tally = self.loader, self.tally
        read = "" if tally is None else f"{_count(tally.records, 'record')}, "
        full = loader.tokens / (loader.rows * self.context)
        counts = (
            f"{self.name}: {read}{_count(loader.documents, 'document')}, {_count(loader.tokens, 'token')} "
            f"({loader.trained_tokens:,} trained), {_count(loader.rows, 'row')} of {self.context:,} "
            f"({full:.0%} full)"
        )
        remarks = [] if tally is None else tally.remarks(self.context)
        return [counts, f"! {'; '.join(remarks)}"] if remarks else [counts]


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Attributes:
        train: the loader of training rows.
        eval: the loader of evaluation rows, read with ``in_order``, or None.
        parts: the counts behind both.
        fingerprint: SHA-256 of what decides the documents and the rows; with equal ``batch`` and
            ``micro_batch``, equal fingerprints mean equal steps.
    """

    train: Loader
    eval: Loader | None
    parts: tuple[Part, ...]
    fingerprint: str

    def lines(self) -> list[str]:
        """The report, a line or two a part."""
        lines = [line for part in self.parts for line in part.lines()]
        if self.train.rows < self.train.batch:
            rows = _count(self.train.rows, "row")
            lines.append(f"! train.batch={self.train.batch} is more than there is: every step has {rows}")
        return lines


@dataclass(frozen=True)
class _Portion:
    """The documents of ``source`` in ``indices``."""

    name: str
    source: Documents
    indices: Indices
    tally: Tally | None


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    directory: Path,
    batch: int,
    micro_batch: int,
    seed: int,
    on_progress: Progress | None = None,
    earlier: Path | None = None,
    vocabulary: int | None = None,
) -> Prepared:
    """Tokenise what ``config`` names into ``directory``, unless it is there, and lay it out in rows.

    A resumed run reads what the first one wrote. One process prepares a directory at a time.

    Args:
        config: the run file's ``data`` section.
        tokenizer: a transformers tokenizer with a fast backend.
        directory: where tokenised documents live, one directory for each key below it.
        batch: rows an optimizer step over all ranks.
        micro_batch: rows a micro-batch.
        seed: of the split, the packing and the shuffling, not below 0.
        on_progress: called after every tokenised batch of records.
        earlier: another such directory, which is read and never written to.
        vocabulary: rows of the model's embedding, which no token id may reach; None: not looked at.

    Raises:
        UserError: for files that are missing or empty, records that ``bad_records`` or ``over_long`` refuse,
            settings that don't fit the records, a tokenizer or chat template that can't serve.
    """
    check_tokenizer(tokenizer)
    find = partial(
        tokenise,
        config=config,
        tokenizer=tokenizer,
        directory=directory,
        on_progress=on_progress,
        earlier=earlier,
        vocabulary=vocabulary,
    )
    portions = _portions(config, seed, find)
    parts = []
    for portion in portions:
        rows = _rows(portion, config, seed)
        loader = Loader(portion.source, rows, batch=batch, micro_batch=micro_batch, seed=seed)
        parts.append(Part(portion.name, loader, config.context, portion.tally))
    return Prepared(
        train=parts[0].loader,
        eval=parts[1].loader if len(parts) == 2 else None,
        parts=tuple(parts),
        fingerprint=_fingerprint(portions, config, seed),
    )


def _portions(config: DataConfig, seed: int, find: Callable[..., Documents]) -> list[_Portion]:
    if isinstance(config.eval, str | list):
        find_sources(config.eval, "data.eval")  # before the training data is tokenised, which may take long
    train = find("data.train", config.train)
    if config.eval is None:
        return [_Portion("train", train, np.arange(len(train)), train.tally)]
    if isinstance(config.eval, float):
        kept, held_out = _split(len(train), config.eval, seed)
        return [_Portion("train", train, kept, train.tally), _Portion("eval", train, held_out, None)]
    evaluated = find("data.eval", config.eval)
    return [
        _Portion("train", train, np.arange(len(train)), train.tally),
        _Portion("eval", evaluated, np.arange(len(evaluated)), evaluated.tally),
    ]


def _split(count: int, share: float, seed: int) -> tuple[Indices, Indices]:
    """Random disjoint indices for training and evaluation, each in rising order and never empty."""
    if count < 2:
        raise UserError(f"data.eval={share} can't hold out a share of a single document; name a file or null")
    held_out = min(max(1, round(count * share)), count - 1)
    order = permutation(count, Purpose.SPLIT, seed)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _rows(portion: _Portion, config: DataConfig, seed: int) -> Rows:
    lengths = portion.source.lengths[portion.indices]
    rows = pack(lengths, config.context, seed) if config.packing else one_each(len(lengths))
    return Rows(portion.indices[rows.documents], rows.starts)


def _fingerprint(portions: list[_Portion], config: DataConfig, seed: int) -> str:
    share = config.eval if isinstance(config.eval, float) else None
    decisive = [[portion.source.key for portion in portions], share, config.packing, seed]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
