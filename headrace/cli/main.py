"""The `headrace` command: commands register here; a user's mistake ends with one sentence and code 2."""

import io
import sys

import typer

from headrace.errors import UserError
from headrace.memory.process import prepare_process

app = typer.Typer(
    help="Train language models larger than the memory at hand, without stalls and without surprises.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; ends the process with 0, 2 for a user's mistake, or 1 for a failure."""
    prepare_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 must not end a run
            stream.reconfigure(errors="replace")
    _register()
    try:
        app()
    except UserError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("headrace: stopped", file=sys.stderr)
        sys.exit(1)


def _register() -> None:
    from headrace.cli.demo import demo
    from headrace.cli.export import export
    from headrace.cli.plan import plan
    from headrace.cli.sample import sample
    from headrace.cli.show import show
    from headrace.cli.train import train

    for command in (plan, train, show, export, sample, demo):
        app.command()(command)
