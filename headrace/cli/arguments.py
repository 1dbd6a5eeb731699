"""Arguments that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from headrace.errors import UserError
from headrace.memory.durable import DISK_FULL

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.yaml", help="the run file, or a saved plan")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="values that replace the run file's"),
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="a run's directory (its `out`)")]


@contextmanager
def writing(place: str) -> Iterator[None]:
    """Around what writes to ``place``, as the user gave it: what the system refuses is a sentence.

    A full disk is none of the user's mistakes and goes on as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise UserError(f"{place} cannot be written to ({error.strerror}): give another path") from error
