"""Whether a model's weights are numbers."""

import torch

from headrace.models.published import Pieces, pieces_of


@torch.no_grad()
def not_finite(model: torch.nn.Module, elsewhere: Pieces | None = None) -> str | None:
    """The first parameter with an element that is infinite or not a number; None if there is none.

    Args:
        model: a model.
        elsewhere: gives those of its parameters that it does not hold itself.
    """
    for name, parameter in model.named_parameters():
        for piece in pieces_of(name, parameter, elsewhere):
            if piece.numel() and not all(bool(bound.isfinite()) for bound in piece.aminmax()):
                return name
    return None
