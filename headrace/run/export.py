"""A run's model as a plain Hugging Face directory, from its newest checkpoint."""

import math
from functools import partial
from pathlib import Path

import torch

from headrace.checkpoint.restore import Checkpoint, find_checkpoint
from headrace.errors import UserError
from headrace.memory.tensorfile import Entry
from headrace.models.load import load_model
from headrace.models.save import model_entries, save_model
from headrace.optim.store import DTYPES
from headrace.run.directory import RunDirectory
from headrace.run.file import validate

MASTER = "master"
"""The table of fp32 weights in a checkpoint."""


def export(run: str | Path, out: str | Path, dtype: str | None = None) -> tuple[int, int]:
    """Write the weights of a run's newest complete checkpoint, streamed tensor by tensor.

    Args:
        run: the run's directory.
        out: the directory to write; it must not exist.
        dtype: ``bf16`` or ``fp32``; the run's own by default.

    Returns:
        How many tensors were written, read back and found equal, and the checkpoint's step.

    Raises:
        UserError: no run, no complete checkpoint, an unknown dtype, ``out`` exists.
    """
    tree = RunDirectory(run).read_plan()
    plan = validate(tree, f"{run}/plan.yaml")
    name = dtype or plan.model.dtype
    if name not in DTYPES:
        raise UserError(f"--dtype {name} cannot be written: choose {' or '.join(DTYPES)}")
    checkpoint = find_checkpoint(Path(run))
    if checkpoint is None:
        raise UserError(f"{run} has no checkpoint yet: train first, see checkpoint.every")
    loaded = load_model(plan.model.path, DTYPES[plan.model.dtype])
    trained = set(checkpoint.names(MASTER))
    entries = [
        _from_checkpoint(checkpoint, entry, DTYPES[name]) if entry.name in trained else entry
        for entry in model_entries(loaded.model, DTYPES[name])
    ]
    model = loaded.model
    count = save_model(out, entries, model.config, loaded.tokenizer, model.generation_config)
    return count, checkpoint.step


def _from_checkpoint(checkpoint: Checkpoint, entry: Entry, dtype: torch.dtype) -> Entry:
    return Entry(entry.name, dtype, entry.shape, partial(_read, checkpoint, entry))


def _read(checkpoint: Checkpoint, entry: Entry) -> list[torch.Tensor]:
    flat = torch.empty(math.prod(entry.shape), dtype=torch.float32)
    checkpoint.read_into(MASTER, entry.name, [flat])
    return [flat]
