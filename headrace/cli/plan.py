"""`headrace plan`: where every byte will live, before anything is allocated."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Overrides, RunFilePath, writing


def plan(
    run: RunFilePath,
    overrides: Overrides = None,
    save: Annotated[
        str | None, typer.Option(metavar="PLAN.yaml", help="write the plan; `headrace train` runs it")
    ] = None,
    machine: Annotated[str | None, typer.Option(help="plan for a preset machine, such as card-24gb")] = None,
) -> None:
    """Predict where every byte of a run will live. Ends with code 2 if it does not fit."""
    from headrace.memory.durable import replace_text
    from headrace.run.plan import plan

    planned = plan(run, overrides or [], machine)
    print(planned.text())
    if save is not None:
        with writing(f"--save {save}"):
            replace_text(Path(save), planned.yaml())
        print(f"Saved  {save}: run it with headrace train {save}")
    if not planned.verdict.fits:
        raise typer.Exit(2)
