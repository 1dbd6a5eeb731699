"""Adapters out and in: the directory that PEFT writes and reads, adapter_config.json beside its tensors."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headrace.errors import UserError
from headrace.memory.tensorfile import Entry, write_tensors
from headrace.models.load import LoadedModel, load_model
from headrace.models.lora import NAME, require_peft
from headrace.models.save import verify_tensors, written_aside
from headrace.models.source import adapter_base
from headrace.models.tokenizer import tokenizer_in

WEIGHTS = "adapter_model.safetensors"
"""PEFT's file of tensors."""

_PREFIX = "base_model.model."  # of every name in it


def adapter_entries(model: PreTrainedModel) -> list[Entry]:
    """The adapters of a model under the names that PEFT gives them in a file."""
    return [
        Entry.of(_PREFIX + name.replace(f".{NAME}.", "."), parameter)
        for name, parameter in model.named_parameters()
        if f".{NAME}." in name
    ]


def save_adapter(
    directory: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    before_replacing: Callable[[Path], None] | None = None,
) -> int:
    """Write a directory that ``peft.PeftModel.from_pretrained(base, directory)`` loads.

    Written aside, fsynced, read back and renamed, as a whole model is. Returns how many tensors were read
    back and equal; raises as :func:`headrace.models.save.save_model` does.

    Args:
        directory: the target.
        model: with adapters of :func:`headrace.models.lora.add_adapters`.
        tokenizer: written beside them.
        overwrite: whether the target may exist.
        before_replacing: given the finished hidden directory before it is renamed.
    """
    entries = adapter_entries(model)
    assert entries, "a model without adapters"
    with written_aside(directory, overwrite, before_replacing) as aside:
        write_tensors(aside / WEIGHTS, entries, {"format": "pt"})
        config = model.peft_config[NAME]
        trained, config.inference_mode = config.inference_mode, True  # as PEFT saves it
        config.save_pretrained(aside)
        config.inference_mode = trained
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        return verify_tensors([aside / WEIGHTS], entries)


def load_adapter(
    directory: str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load an adapter and the base model that its configuration names, for inference.

    Raises UserError where peft or the base is missing, or the adapter is not of that base.
    """
    peft = require_peft()
    base = adapter_base(directory)
    if base is None:
        raise UserError(f"{directory}/adapter_config.json names no base_model_name_or_path: add it there")
    try:
        loaded = load_model(base, dtype, device)
    except UserError as error:
        raise UserError(
            f"{directory} is an adapter, and its base cannot be loaded: {error}; base_model_name_or_path in "
            "its adapter_config.json says where the base is"
        ) from error
    config = peft.PeftConfig.from_pretrained(str(directory))
    try:
        peft.inject_adapter_in_model(config, loaded.model, NAME)
        weights = peft.utils.load_peft_weights(str(directory), device="cpu")
        outcome = peft.utils.set_peft_model_state_dict(loaded.model, weights, NAME)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{directory} does not fit its base {base}: {error}") from error
    absent = [name for name in outcome.missing_keys if f".{NAME}." in name]
    if odd := [*outcome.unexpected_keys, *absent]:
        raise UserError(
            f"{directory} does not fit its base {base}, first at {odd[0]}: fetch or save it again"
        )
    return LoadedModel(loaded.model.eval(), tokenizer_in(Path(directory)) or loaded.tokenizer)
