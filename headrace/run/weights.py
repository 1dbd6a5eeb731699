"""What was trained, as a model directory: at the end of a run, and as a checkpoint without states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.checkpoint.restore import Checkpoint
from headrace.errors import UserError
from headrace.models.adapter import save_adapter
from headrace.models.save import model_entries, save_model
from headrace.run.build import Job
from headrace.run.file import RunFile

_WEIGHTS_ONLY = "weights_only"


def save_trained(target: Path, job: Job, run: RunFile, **settings: Any) -> int:
    """Write what was trained, the model or its adapters; returns how many tensors were read back and equal.

    ``settings`` are those of :func:`headrace.models.save.save_model`.
    """
    model, tokenizer = job.model, job.loaded.tokenizer
    if run.model.lora is not None:
        return save_adapter(target, model, tokenizer, **settings)
    entries = model_entries(model, pieces=job.elsewhere)
    return save_model(target, entries, model.config, tokenizer, model.generation_config, **settings)


def weights_only(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint from which no run goes on."""
    return {**state, _WEIGHTS_ONLY: True}


def weights_writer(job: Job, run: RunFile) -> Callable[[Path], None]:
    """Writes what was trained into the directory of a checkpoint in the making."""

    def write(directory: Path) -> None:
        inner = directory / "model"  # a kill leaves nothing beside the directory, which is cleaned up
        save_trained(inner, job, run)
        for path in inner.iterdir():
            path.rename(directory / path.name)
        inner.rmdir()

    return write


def refuse_weights_only(start: Checkpoint | None) -> None:
    """Raise UserError where a run would have to go on from a checkpoint without states."""
    if start is not None and start.state.get(_WEIGHTS_ONLY):
        raise UserError(
            f"{start.path} holds weights only (checkpoint.states=false), from which no run goes on: train "
            f"them further with model.path={start.path} and another out, or start afresh with "
            "checkpoint.resume=never"
        )


def refuse_export(checkpoint: Checkpoint) -> None:
    """Raise UserError for a checkpoint without master weights."""
    if checkpoint.state.get(_WEIGHTS_ONLY):
        raise UserError(
            f"{checkpoint.path} holds weights only (checkpoint.states=false) and is a model directory "
            "already: copy it"
        )
