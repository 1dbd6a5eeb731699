"""A small checkpoint whose every value follows from its step; run as a program, one that saves until killed.

The program reads a line of JSON each: the arguments of `save_until_killed`. It forks, so that torch is
imported once for many kills, and prints the child's number, what the child says, and how it ended.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from headrace.checkpoint.manifest import Environment
from headrace.checkpoint.save import save_checkpoint
from headrace.memory.tensorfile import Entry

ENVIRONMENT = Environment.here({"cpu": 2})
SHAPES = {"embed.weight": (7, 3), "norm.weight": (5,), "scale": (), "none": (0, 4)}
FILES = ["exp_avg.safetensors", "manifest.json", "master.safetensors", "state.json"]


def tables_of(step, shapes=SHAPES):
    """Entries of two tables, in pieces of four elements, and the tensors behind them."""
    tensors = {
        table: {name: torch.full(shape, float(10 * step + i)) for name, shape in shapes.items()}
        for i, table in enumerate(("master", "exp_avg"))
    }
    entries = {table: [entry(*item) for item in named.items()] for table, named in tensors.items()}
    return entries, tensors


def entry(name, tensor):
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor.view(-1).split(4))


def state_of(step):
    return {"step": step, "position": [step, 3 * step], "share": step / 3}


def save(run, step, keep=1):
    return save_checkpoint(run, step, tables_of(step)[0], state_of(step), environment=ENVIRONMENT, keep=keep)


def restore(checkpoint, tables):
    """Fill the pieces of entries that the checkpoint must fit."""
    checkpoint.check(tables)
    for table, entries in tables.items():
        for entry in entries:
            checkpoint.read_into(table, entry.name, entry.pieces())


def check(checkpoint):
    """The content of a checkpoint is exactly that of its step."""
    wanted, (entries, found) = tables_of(checkpoint.step)[1], tables_of(-1)
    restore(checkpoint, entries)
    assert checkpoint.state == state_of(checkpoint.step)
    for table, tensors in wanted.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[table][name], tensor), (table, name)


def hidden(run):
    return sorted(path.name for path in run.iterdir() if path.name.startswith("."))


def save_until_killed(run, first, keep, kill_at):
    """Save steps from `first` on, saying each when it is done.

    With `kill_at`, the second save ends with SIGKILL before that line of it, counted over Headrace's own code
    and the deletion of trees; a save of fewer lines ends in peace and says how many it had.
    """
    say(saved := save(Path(run), first, keep))
    if kill_at is None:
        while True:
            first += 1
            say(saved := save(Path(run), first, keep))
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        lines += event == "line"
        if lines == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    sys.settrace(lambda frame, *_: count if counted(frame.f_code.co_filename) else None)
    saved = save(Path(run), first + 1, keep)
    sys.settrace(None)
    say(saved)
    say(f"lines-{lines}")


def counted(filename):
    return f"{os.sep}headrace{os.sep}" in filename or filename.endswith("shutil.py")


def say(words):
    os.write(1, f"{Path(words).name}\n".encode())


def serve():
    for line in sys.stdin:
        if pid := os.fork():
            say(f"child-{pid}")
            say(f"ended-{os.waitpid(pid, 0)[1]}")
        else:
            save_until_killed(*json.loads(line))
            os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
