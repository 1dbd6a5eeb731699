"""A run's model as a plain Hugging Face directory, from its newest checkpoint."""

from functools import partial
from pathlib import Path

import torch

from headrace.checkpoint.restore import Checkpoint, find_checkpoint
from headrace.errors import UserError
from headrace.memory.weights import DTYPES
from headrace.models.adapter import save_adapter
from headrace.models.load import load_model
from headrace.models.lora import add_adapters, merge
from headrace.models.save import model_entries, save_model
from headrace.planner.workload import ELEMENT
from headrace.run.base import check_base
from headrace.run.directory import RunDirectory
from headrace.run.file import RunFile, validate
from headrace.run.weights import refuse_export

MASTER = "master"
"""The table of fp32 weights in a checkpoint."""

_ATTEMPTS = 5  # a run that goes on may remove the checkpoint while it is read: then there is a newer one


def export(
    run: str | Path, out: str | Path, dtype: str | None = None, *, merged: bool = False
) -> tuple[int, int]:
    """Write the weights of a run's newest complete checkpoint, streamed tensor by tensor.

    A run with ``model.lora`` gives its adapter, or with ``merged`` the whole model that the adapter makes.

    Args:
        run: the run's directory.
        out: the directory to write; it must not exist.
        dtype: ``bf16`` or ``fp32``; the run's own by default.
        merged: adapters only: whether they are added, in fp32, to the weights that they stand beside.

    Returns:
        How many tensors were written, read back and found equal, and the checkpoint's step.

    Raises:
        UserError: no run, no complete checkpoint, an unknown dtype, nothing to merge, ``out`` exists.
    """
    directory = RunDirectory(run)
    tree = directory.read_plan()
    plan = validate(tree, f"{run}/plan.yaml")
    name = dtype or plan.model.dtype
    if name not in ELEMENT:
        raise UserError(f"--dtype {name} cannot be written: choose {' or '.join(ELEMENT)}")
    if merged and plan.model.lora is None:
        raise UserError(f"--merge: {run} trains the whole model and has no adapter: leave --merge out")
    for _ in range(_ATTEMPTS):
        checkpoint = find_checkpoint(directory.path)
        if checkpoint is None:
            raise UserError(f"{run} has no checkpoint yet: train first, see checkpoint.every")
        try:
            return _write(plan, out, checkpoint, DTYPES[name], merged), checkpoint.step
        except (UserError, FileNotFoundError):
            if checkpoint.path.exists():
                raise
    raise UserError(
        f"{run} goes on and removes its checkpoints faster than they can be read: raise checkpoint.keep "
        "there, or wait for its end"
    )


def _write(plan: RunFile, out: str | Path, checkpoint: Checkpoint, dtype: torch.dtype, merged: bool) -> int:
    refuse_export(checkpoint)
    loaded, lora = load_model(plan.model.path, dtype), plan.model.lora
    model = loaded.model
    check_base(checkpoint, plan, model, accept=False)
    if lora is not None and not merged:
        add_adapters(model, lora, plan.model.path)
        _fill(model, checkpoint)
        return save_adapter(out, model, loaded.tokenizer)
    if lora is not None:
        merge(model, lora, partial(_read, checkpoint))
    else:
        _fill(model, checkpoint)
    return save_model(out, model_entries(model), model.config, loaded.tokenizer, model.generation_config)


def _read(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.empty(shape)
    checkpoint.read_into(MASTER, name, [values.view(-1)])
    return values


@torch.no_grad()
def _fill(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Put the master weights into the model, rounded on the way; what was not trained stays as loaded."""
    trained = set(checkpoint.names(MASTER))
    for name, parameter in model.named_parameters():
        if name in trained:
            checkpoint.read_into(MASTER, name, [parameter.view(-1)])
