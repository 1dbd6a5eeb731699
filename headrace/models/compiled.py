"""Compiled layers: torch.compile on the parts of a model's layers whose code does not depend on documents."""

import os

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import UserError


def compile_layers(model: PreTrainedModel) -> int:
    """Compile norms and feed-forward parts of every layer in place; they run from their first call on.

    Attention stays as it is, since its documents differ from batch to batch; so do experts, whose tokens do.
    Compiled code rounds less often than torch's own in 16 bits, so results are equal to rounding only.

    Returns:
        How many modules were compiled.

    Raises:
        UserError: no compiler that torch can use, or a model in which there is nothing to compile.
    """
    check_compiler(model.device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    parts = [part for layer in layers for part in layer.children() if _is_plain(part)]
    if not parts:
        raise UserError(
            f"train.compile=true: {type(model).__name__} has no layers with parts to compile: set it to false"
        )
    for part in parts:
        part.compile(dynamic=True)
    return len(parts)


def _is_plain(part: nn.Module) -> bool:
    """Whether it is neither attention, which knows its layer's number, nor experts, which are 3-D."""
    attends = any(hasattr(module, "layer_idx") for module in part.modules())
    parameters = list(part.parameters())
    return bool(parameters) and not attends and all(p.dim() <= 2 for p in parameters)


def check_compiler(device: torch.device) -> None:
    """Compile and run something small.

    Raises UserError where torch can use no compiler for this device.
    """
    # Its helper processes would each take the memory of a torch, which no plan knows of.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        torch.compile(_probe, dynamic=True)(torch.ones(17, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        compiler = "a C++ compiler (g++ or clang++)" if device.type == "cpu" else "Triton and a C compiler"
        raise UserError(
            f"train.compile=true needs {compiler}, and torch could not use one here ({reason}): install it, "
            "or set train.compile=false"
        ) from error


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).sum()
