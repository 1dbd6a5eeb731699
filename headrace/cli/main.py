"""The `headrace` command: commands register here; a user's mistake ends with one sentence and code 2."""

# Nothing that takes time is imported before `main` has said what Ctrl-C does.
import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from headrace.run.interrupt import INTERRUPTED, STOPPED, watch

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line.

    Ends the process with 0, with 2 for a user's mistake, 1 for a failure, or 130 after Ctrl-C, each of these
    with one sentence on standard error.
    """
    watch()
    try:
        _app()()
    except KeyboardInterrupt:
        _end(STOPPED, INTERRUPTED)


def _app() -> "typer.Typer":
    from headrace.memory.process import prepare_process

    prepare_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 must not end a run
            stream.reconfigure(errors="replace")

    import typer

    app = typer.Typer(
        help="Train language models larger than the memory at hand, without stalls and without surprises.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for command in _commands():
        app.command()(_in_one_sentence(command))
    return app


def _commands() -> tuple[Callable[..., None], ...]:
    from headrace.cli.data import data
    from headrace.cli.demo import demo
    from headrace.cli.doctor import doctor
    from headrace.cli.export import export
    from headrace.cli.plan import plan
    from headrace.cli.sample import sample
    from headrace.cli.schema import schema
    from headrace.cli.show import show
    from headrace.cli.train import train

    return plan, data, train, show, export, sample, doctor, schema, demo


def _in_one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose foreseen ends are a sentence and a code; typer would end without a word for some."""
    from headrace.errors import RunStopped, UserError

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _end(STOPPED, INTERRUPTED)
        except UserError as error:
            _end(str(error), 2)
        except RunStopped as error:
            _end(str(error), 1)
        except OSError as error:
            _end(_refused(error), 1)

    return run


def _refused(error: OSError) -> str:
    """What the system refused, in a sentence; raises the error where only its traceback tells."""
    from headrace.memory.durable import DISK_FULL

    if isinstance(error, BrokenPipeError) or (error.errno in DISK_FULL and not _output_works()):
        _silence_output()
        return f"standard output takes no more ({error.strerror}): the command was stopped there"
    if error.errno in DISK_FULL:
        return f"the disk is full ({error.strerror}): make room and give the same command again"
    raise error


def _output_works() -> bool:
    """Whether standard output takes an empty line: which file an error is of is not always said."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _silence_output() -> None:
    """What is still to be written must not fail again as Python ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(sentence: str, code: int) -> NoReturn:
    with suppress(OSError):
        print(f"headrace: {sentence}", file=sys.stderr)
    sys.exit(code)
