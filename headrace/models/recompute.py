"""Activation checkpointing of a Hugging Face model's layers: keep each layer's input, recompute the rest."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from headrace.errors import UserError

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Called at the forward of a layer: the contexts to run its forward and its recomputation in."""


def recompute_layers(model: nn.Module, contexts: Contexts | None = None) -> None:
    """Recompute every layer in backward (Chen et al. 2016), by transformers' own switch, non-reentrant.

    Calling it again replaces the contexts. The model must be in training mode for it to act.

    Args:
        model: a transformers model.
        contexts: passed on as ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        UserError: if the model cannot recompute its layers.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{type(model).__name__} cannot recompute its layers: set memory.activations=keep for this model"
        )
    options: dict[str, object] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts
    # transformers 5.24 renamed the switch and warns about the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)  # type: ignore[operator]
