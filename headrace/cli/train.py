"""`headrace train`: a run from its file to a model directory."""

from headrace.cli.arguments import Overrides, RunFilePath


def train(run: RunFilePath, overrides: Overrides = None) -> None:
    """Train a model; the same command goes on where an earlier one was stopped or killed."""
    from headrace.run.train import train as train_run

    train_run(run, overrides or [])
