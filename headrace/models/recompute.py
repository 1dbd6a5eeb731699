"""Activation checkpointing of a Hugging Face model's layers: keep each layer's input, recompute the rest."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from headrace.errors import UserError
from headrace.models.documents import Contexts, Recalling, both

Checkpoint = Callable[..., Any]
"""What is called in place of ``torch.utils.checkpoint.checkpoint``, with its arguments."""


def recompute_layers(
    model: nn.Module,
    contexts: Contexts | None = None,
    of_layers: Mapping[nn.Module, Contexts] | None = None,
    instead: Mapping[nn.Module, Checkpoint] | None = None,
) -> None:
    """Recompute every layer in backward (Chen et al. 2016), by transformers' own switch, non-reentrant.

    Calling it again replaces the contexts. The model must be in training mode for it to act.

    Args:
        model: a transformers model.
        contexts: of each layer's forward and recomputation, ``context_fn`` of ``torch.utils.checkpoint``.
        of_layers: further ones of single layers, entered outside of the others.
        instead: what single layers call in place of torch's function.

    Raises:
        UserError: if the model cannot recompute its layers.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{type(model).__name__} cannot recompute its layers: set memory.activations=keep for this model"
        )
    options: dict[str, object] = {"use_reentrant": False, "context_fn": Recalling(contexts)}
    # transformers 5.24 renamed the switch and warns about the older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)  # type: ignore[operator]
    if hasattr(model, "disable_input_require_grads"):
        # The reentrant kind needs gradients at its inputs. This one would run backward where nothing trains.
        model.disable_input_require_grads()  # type: ignore[operator]
    of_layers, instead = of_layers or {}, instead or {}
    for layer in of_layers.keys() | instead.keys():
        own, function = of_layers.get(layer), instead.get(layer, checkpoint)
        recalling = Recalling(both(own, contexts) if own else contexts)
        layer._gradient_checkpointing_func = partial(  # type: ignore[assignment]
            function, use_reentrant=False, context_fn=recalling
        )
