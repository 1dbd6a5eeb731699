"""What a run's data will be: rows as the model will see them, and what became of every record."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from headrace.data.batch import MicroBatch
from headrace.data.loader import Loader
from headrace.data.prepare import Part, Prepared, prepare
from headrace.data.render import Page, render
from headrace.models.source import read_config
from headrace.models.tokenizer import check_vocabulary, load_tokenizer, no_tokenizer
from headrace.run.directory import RunDirectory
from headrace.run.file import RunFile, read_run_file


@dataclass(frozen=True)
class SampleRow:
    """A row of the first steps.

    Attributes:
        title: its place in the run and its size.
        pages: its documents.
    """

    title: str
    pages: list[Page]


@dataclass(frozen=True)
class DataView:
    """What there is to see of a run's data.

    Attributes:
        rows: the first rows in the order of training.
        counts: a table of records, documents, tokens and rows.
        remarks: what a reader must know besides; may be empty.
    """

    rows: list[SampleRow]
    counts: list[str]
    remarks: list[str]


def look(
    source: str | Path | RunFile,
    overrides: Sequence[str] = (),
    *,
    samples: int = 3,
    on_progress: Callable[[int, int], None] | None = None,
) -> DataView:
    """Prepare a run's data as training would, and look at its first rows. Nothing is written into ``out``.

    What an earlier run tokenised there is used; else it is tokenised into a temporary directory.

    Args:
        source: a run file, by path or already read.
        overrides: ``section.key=value`` texts.
        samples: how many rows to show.
        on_progress: called with the bytes tokenised so far, and all of them.

    Raises:
        UserError: what the run file or the data refuse, as training does.
    """
    run = source if isinstance(source, RunFile) else read_run_file(source, overrides)
    tokenizer = load_tokenizer(run.model.path)
    if tokenizer is None:
        raise no_tokenizer(run.model.path)
    vocabulary = _vocabulary(run.model.path)
    if vocabulary is not None:
        check_vocabulary(tokenizer, vocabulary, run.model.path)
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as aside:
        data = prepare(
            run.data,
            tokenizer,
            directory=Path(aside),
            batch=run.train.batch,
            micro_batch=1,
            seed=run.train.seed,
            on_progress=on_progress,
            earlier=RunDirectory(run.out).data,
            vocabulary=vocabulary,
        )
        rows = [
            SampleRow(_title(place, batch, data.train, run.data.context), render(batch, tokenizer)[0])
            for place, batch in enumerate(_first_rows(data.train, samples))
        ]
        return DataView(rows, counts(data), list(_remarks(data)))


def _vocabulary(path: str) -> int | None:
    """Rows of the model's embedding, where its configuration tells."""
    config = read_config(path)
    nested = config.get("text_config")
    rows = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return rows if isinstance(rows, int) else None


def _first_rows(loader: Loader, count: int) -> Iterator[MicroBatch]:
    """The rows of the first steps in the order of training, at most an epoch of them."""
    steps = (loader.step(index) for index in range(loader.steps_per_epoch))
    return islice(chain.from_iterable(steps), count)


def _title(place: int, batch: MicroBatch, loader: Loader, context: int) -> str:
    tokens = sum(stop - start for _, start, stop in batch.documents)
    step, row = divmod(place, loader.batch)
    documents = f"{len(batch.documents)} document{'s' if len(batch.documents) > 1 else ''}"
    size = f"{documents}, {tokens:,} of {context:,} tokens, {batch.valid_tokens:,} trained"
    return f"Step {step + 1}, row {row + 1}: {size}"


def counts(data: Prepared) -> list[str]:
    """Figures of training and evaluation side by side, in aligned columns."""
    rows = [("", [part.name for part in data.parts])]
    names = _figures(data.parts[0])
    columns = [_figures(part) for part in data.parts]
    rows += [(name, [column.get(name, "") for column in columns]) for name in names]
    width = max(len(name) for name, _ in rows)
    widths = [max(len(cells[place]) for _, cells in rows) for place in range(len(columns))]
    return [
        f"{name:{width}}  {'  '.join(f'{cell:>{w}}' for cell, w in zip(cells, widths, strict=True))}".rstrip()
        for name, cells in rows
    ]


def _figures(part: Part) -> dict[str, str]:
    loader, tally = part.loader, part.tally
    records = {}
    if tally is not None:
        counted = {
            "records read": tally.read,
            "  used": tally.records,
            "    cut to the context": tally.cut,
            "  skipped, flawed": tally.skipped,
            "  skipped, too long": tally.over_long,
        }
        records = {name: f"{number:,}" for name, number in counted.items()}
    return {
        **records,
        "documents": f"{loader.documents:,}",
        "tokens": f"{loader.tokens:,}",
        "  trained": f"{loader.trained_tokens:,}",
        "  trained share": f"{loader.trained_tokens / loader.tokens:.1%}",
        f"rows of {part.context:,}": f"{loader.rows:,}",
        "  filled": f"{loader.tokens / (loader.rows * part.context):.1%}",
        "steps an epoch": f"{loader.steps_per_epoch:,}" if part.name == "train" else "",
    }


def _remarks(data: Prepared) -> Iterator[str]:
    for part in data.parts:
        if part.tally is None:
            continue
        yield from (f"{part.name}: {remark}" for remark in part.tally.remarks(part.context))
        if len(part.tally.reasons) > 1:
            reasons = sorted(part.tally.reasons.items(), key=lambda reason: (-reason[1], reason[0]))
            why = "; ".join(f"{reason} ({number:,})" for reason, number in reasons)
            yield f"{part.name}: skipped because it {why}"
    if data.train.rows < data.train.batch:
        yield f"train.batch={data.train.batch} is more than there is: every step has {data.train.rows} rows"
