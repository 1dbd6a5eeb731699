"""The command line, with Ctrl-C pressed at chosen moments: `python pressing.py backward:6,save:0 train RUN`.

A moment is a phase and which of its occurrences, counted from 0.
"""

import os
import signal
import sys


def press_in(moments):
    """Send this process a SIGINT, as a terminal does, as each of the moments begins."""
    import torch

    from headrace.checkpoint import save
    from headrace.run import build, train

    phases = {
        "load": (build, "load_model"),
        "backward": (torch.Tensor, "backward"),
        "save": (save, "write_tensors"),
        "closing": (train, "save_trained"),
    }
    for phase in {phase for phase, _ in moments}:
        _press(*phases[phase], {occurrence for of, occurrence in moments if of == phase})


def _press(owner, name, occurrences):
    original, calls = getattr(owner, name), []

    def wrapped(*arguments, **options):
        calls.append(None)
        if len(calls) - 1 in occurrences:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    setattr(owner, name, wrapped)


def parse(text):
    """`backward:6,save:0` -> pairs of a phase and a number."""
    pairs = (moment.split(":") for moment in text.split(","))
    return [(phase, int(occurrence)) for phase, occurrence in pairs]


if __name__ == "__main__":
    from headrace.cli.main import main
    from headrace.memory.process import prepare_process

    prepare_process()
    press_in(parse(sys.argv.pop(1)))
    main()
