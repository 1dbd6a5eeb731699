"""Arguments that several commands share."""

from typing import Annotated

import typer

RunFilePath = Annotated[str, typer.Argument(metavar="RUN.yaml", help="the run file, or a saved plan")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="values that replace the run file's"),
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="a run's directory (its `out`)")]
