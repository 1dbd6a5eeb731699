"""The `headrace` command: commands register here; a user's mistake ends with one sentence and code 2."""

import io
import sys
from typing import NoReturn

import typer

from headrace.errors import RunStopped, UserError
from headrace.memory.durable import DISK_FULL
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
        _end(str(error), 2)
    except RunStopped as error:
        _end(str(error), 1)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _end(f"the disk is full ({error.strerror}): make room and give the same command again", 1)


def _end(sentence: str, code: int) -> NoReturn:
    print(f"headrace: {sentence}", file=sys.stderr)
    sys.exit(code)


def _register() -> None:
    from headrace.cli.demo import demo
    from headrace.cli.export import export
    from headrace.cli.plan import plan
    from headrace.cli.sample import sample
    from headrace.cli.show import show
    from headrace.cli.train import train

    for command in (plan, train, show, export, sample, demo):
        app.command()(command)
