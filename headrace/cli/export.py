"""`headrace export`: the model of a run's newest checkpoint as a Hugging Face directory."""

from typing import Annotated

import typer

from headrace.cli.arguments import RunPath


def export(
    run: RunPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="the directory to write")],
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32; the run's own by default")] = None,
) -> None:
    """Write the model of a run's newest complete checkpoint as a plain Hugging Face directory."""
    from headrace.run.export import export as export_run

    count, step = export_run(run, out, dtype)
    print(f"Model  {out}: step {step}, {count} tensors written, read back, equal")
