"""A run that kills itself with SIGKILL at a chosen moment; runs in a process of its own."""

import os
import signal
import threading

PHASES = ("backward", "update", "save", "publish")


def run(path, overrides=(), phase=None, occurrence=0, delay=0.0):
    """Train; in the given phase's n-th occurrence, start a timer that kills this process."""
    import torch

    from headrace.run import train as train_module

    torch.set_num_threads(1)
    if phase == "gradients":
        _tear(occurrence)
    elif phase is not None:
        _arm(phase, occurrence, delay)
    train_module.train(path, list(overrides))


def _arm(phase, occurrence, delay):
    import torch

    from headrace.checkpoint import save
    from headrace.optim.engine import Engine
    from headrace.optim.states import DiskStates
    from headrace.run import train as train_module

    owner, name = {
        "backward": (torch.Tensor, "backward"),
        "update": (Engine, "step"),
        "flush": (DiskStates, "write"),
        "save": (train_module, "save_checkpoint"),
        "publish": (save, "_remove_older"),
    }[phase]
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == occurrence + 1:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _tear(occurrence):
    """Kill in the n-th write of gradients, after half of its block."""
    from headrace.memory.blocks import ALIGN, Block, BlockFile

    original, calls = BlockFile.write, []

    def wrapped(file, block):
        if "gradients-" in file.path.name:
            calls.append(None)
            if len(calls) == occurrence + 1:
                half = max(ALIGN, block.memory.nbytes // 2 // ALIGN * ALIGN)
                original(file, Block(block.memory[:half], block.offset))
                os.kill(os.getpid(), signal.SIGKILL)
        return original(file, block)

    BlockFile.write = wrapped
