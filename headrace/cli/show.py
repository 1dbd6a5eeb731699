"""`headrace show`: what a run was planned to hold and what it held, in figures, as a picture, as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import RunPath


def show(
    run: RunPath,
    picture: Annotated[
        str | None, typer.Option(metavar="OUT.png", help="draw losses, memory and lanes (or .svg, .pdf)")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="OUT.json", help="write the last steps, action by action, for ui.perfetto.dev"),
    ] = None,
) -> None:
    """Show a run: how far it is, its loss, predicted beside measured."""
    from headrace.run.show import describe, find, write_chrome_trace

    found = find(run)
    for line in describe(found):
        print(line)
    if picture is not None:
        from headrace.run.picture import draw

        draw(found, Path(picture))
        print(f"Drawn  {picture}")
    if trace is not None:
        write_chrome_trace(found, Path(trace))
        print(f"Trace  {trace}: open it at https://ui.perfetto.dev")
