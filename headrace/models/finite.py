"""Whether a model's weights are numbers."""

import torch


@torch.no_grad()
def not_finite(model: torch.nn.Module) -> str | None:
    """The first parameter with an element that is infinite or not a number; None if there is none."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bool(bound.isfinite()) for bound in parameter.aminmax()):
            return name
    return None
