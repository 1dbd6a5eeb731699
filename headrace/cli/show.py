"""`headrace show`: what a run was planned to hold and what it held."""

from headrace.cli.arguments import RunPath


def show(run: RunPath) -> None:
    """Show a run: how far it is, its loss, predicted beside measured."""
    from headrace.run.show import describe

    for line in describe(run):
        print(line)
