"""Under which names the tensors of a model are published, and where in the model's own they lie.

Since version 5 transformers keeps all experts of a layer in one tensor, while model hubs, and everything that
reads their files, have each matrix of each expert under a name of its own. ``save_pretrained`` translates
back; so do we, without a copy: every published tensor is a stretch of one of the model's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

Pieces = Callable[[str, int, int], Iterator[torch.Tensor] | None]
"""``pieces(name, start, stop)``: elements of a tensor that lives elsewhere, 1-D; None for others."""


def pieces_of(
    name: str, tensor: torch.Tensor, elsewhere: Pieces | None, start: int = 0, stop: int | None = None
) -> Iterable[torch.Tensor]:
    """Elements ``start:stop`` of a model's tensor in 1-D pieces, wherever it lives."""
    stop = tensor.numel() if stop is None else stop
    found = elsewhere(name, start, stop) if elsewhere else None
    return [tensor.detach().reshape(-1)[start:stop]] if found is None else found


@dataclass(frozen=True)
class Stretch:
    """A published tensor inside one of the model's.

    Attributes:
        name: the model's tensor.
        start: its first element there, counted in the flattened tensor.
        shape: of the published tensor.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + prod(self.shape)


def published_names(model: PreTrainedModel) -> dict[str, Stretch]:
    """Published name -> its stretch, for all of ``model.state_dict()``.

    They are transformers' own translation, carried out on tensors without memory. Where it is more than
    cutting (a transposition, say), and where transformers offers none, the names are the model's own.
    """
    state = model.state_dict()
    own = {name: Stretch(name, 0, tuple(tensor.shape)) for name, tensor in state.items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return own
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    with torch.no_grad(), _Views():
        return _stretches(blank, revert_weight_conversion(model, blank)) or own


class _Views(TorchFunctionMode):
    """Leaves a cut tensor where it is: a copy would not tell where it came from."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _stretches(
    own: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor]
) -> dict[str, Stretch] | None:
    """None unless the published tensors cut the model's own without rest."""
    names = {_address(tensor): name for name, tensor in own.items()}
    found = {}
    for name, tensor in published.items():
        if _address(tensor) not in names or not tensor.is_contiguous():
            return None
        found[name] = Stretch(names[_address(tensor)], int(tensor.storage_offset()), tuple(tensor.shape))
    return found if _covers(own, found) else None


def _covers(own: Mapping[str, torch.Tensor], found: Mapping[str, Stretch]) -> bool:
    position = dict.fromkeys(own, 0)
    for stretch in sorted(found.values(), key=lambda stretch: stretch.start):
        if stretch.start != position[stretch.name]:
            return False
        position[stretch.name] = stretch.stop
    return position == {name: tensor.numel() for name, tensor in own.items()}


def _address(tensor: torch.Tensor) -> int:
    return id(tensor._base) if tensor._base is not None else id(tensor)
