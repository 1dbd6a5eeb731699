"""`headrace train`: a run from its file to a model directory."""

import sys

import typer

from headrace.cli.arguments import Overrides, RunFilePath

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of every program that it ends."""


def train(run: RunFilePath, overrides: Overrides = None) -> None:
    """Train a model; the same command goes on where an earlier one was stopped or killed."""
    from headrace.run.train import train as train_run

    try:
        train_run(run, overrides or [])
    except KeyboardInterrupt:
        print("headrace: stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
