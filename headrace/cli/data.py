"""`headrace data`: what the model will see, before it is trained on it."""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import Overrides, RunFilePath

if TYPE_CHECKING:
    from headrace.data.render import Page

_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def data(
    run: RunFilePath,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(min=0, help="rows to show")] = 3,
) -> None:
    """Show the first rows as the model will see them, and count records, tokens and rows."""
    from headrace.run.samples import look

    styled = _is_styled()
    view = look(run, overrides or [], samples=samples, on_progress=_progress if sys.stderr.isatty() else None)
    if view.rows:
        print(f"{_style('dim', _DIM, styled) if styled else '‹marked›'} text is read, the rest is trained")
    for row in view.rows:
        print(f"\n{_style(row.title, _BOLD, styled)}")
        for number, page in enumerate(row.pages, start=1):
            title = f"── document {number}: {page.tokens:,} tokens, {page.trained:,} trained "
            print(_style(title.ljust(72, "─"), _BOLD, styled))
            print("".join(_text(page, styled)))
    print(*["", *view.counts] if view.rows else view.counts, sep="\n")
    for remark in view.remarks:
        print(f"! {remark}")


def _is_styled() -> bool:
    """Whether standard output is a terminal that may be styled: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _text(page: "Page", styled: bool) -> Iterator[str]:
    for piece in page.pieces:
        if piece.trained:
            yield piece.text
        else:
            yield _style(piece.text, _DIM, True) if styled else f"‹{piece.text}›"


def _style(text: str, code: str, styled: bool) -> str:
    return f"{code}{text}{_RESET}" if styled else text


def _progress(done: int, total: int) -> None:
    end = "\r" if done < total else "\r\x1b[K"
    print(f"\rtokenised {done / max(1, total):.0%}", end=end, file=sys.stderr, flush=True)
