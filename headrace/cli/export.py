"""`headrace export`: the model of a run's newest checkpoint as a Hugging Face directory."""

from typing import Annotated

import typer

from headrace.cli.arguments import RunPath, writing


def export(
    run: RunPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="the directory to write")],
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32; the run's own by default")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="add a run's adapter to the weights: a whole model")
    ] = False,
) -> None:
    """Write the model, or the adapter, of a run's newest complete checkpoint."""
    from headrace.run.export import export as export_run
    from headrace.run.train import plain_warnings

    with writing(out), plain_warnings():
        count, step = export_run(run, out, dtype, merged=merge)
    print(f"Model  {out}: step {step}, {count} tensors written, read back, equal")
