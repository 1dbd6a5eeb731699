"""Whether adapters meet the weights again beside which they were trained: no checkpoint holds those."""

import warnings

from transformers import PreTrainedModel

from headrace.checkpoint.restore import Checkpoint
from headrace.errors import UserError
from headrace.models.lora import fingerprint
from headrace.models.published import Pieces
from headrace.run.file import RunFile


def base_of(run: RunFile, model: PreTrainedModel, elsewhere: Pieces | None = None) -> str | None:
    """What a checkpoint notes of the frozen weights; None where none are frozen.

    ``elsewhere`` gives those that the model does not hold itself.
    """
    return None if run.model.lora is None else fingerprint(model, elsewhere)


def check_base(
    start: Checkpoint, run: RunFile, model: PreTrainedModel, accept: bool, elsewhere: Pieces | None = None
) -> None:
    """Raise UserError, or warn if ``accept``, where the model is not the one that the checkpoint is of."""
    if start.state.get("base") == base_of(run, model, elsewhere):
        return
    if not accept:
        raise UserError(
            f"model.path={run.model.path} holds other weights than those beside which {start.path} was "
            "trained: bring them back, choose another out, or go on all the same with "
            "checkpoint.accept_changes=true"
        )
    warnings.warn(f"going on beside other weights than {start.path} was trained beside", stacklevel=2)
