"""The working weights: where they lie, and whether somebody else wrote to them since our last write."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.errors import UserError


class WorkingWeights:
    """The trained parameters of a model, as flat views.

    torch counts in-place writes to a tensor; a count that is not the one at :meth:`remember` means that
    somebody else wrote. Writes through ``parameter.data`` or numpy are not counted.

    Args:
        named: contiguous parameters, in the order of the layout.

    Attributes:
        flat: 1-D views of them, which share their memory and their counts.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self._names = list(named)
        self._parameters = list(named.values())
        # They keep the memory alive, so that nothing else can take its place at the same address.
        self._places = [parameter.detach() for parameter in self._parameters]
        self.flat = [place.view(-1) for place in self._places]
        self._versions = self._count()

    def check_places(self) -> None:
        """Raise UserError if a parameter is not in the memory any more in which it was at the start."""
        for name, parameter, place in zip(self._names, self._parameters, self._places, strict=True):
            if not _same_memory(parameter, place):
                raise UserError(
                    f"{name} was moved or replaced since OffloadedAdamW was built ({_described(place)} then, "
                    f"{_described(parameter)} now): give the model its last device, dtype and memory first, "
                    "then build the optimizer"
                )

    def written(self, parameter: int | None = None) -> list[int]:
        """The parameters, or whether this one, that somebody else may have written to."""
        if parameter is not None:
            return [parameter] if self._parameters[parameter]._version != self._versions[parameter] else []
        counts = self._count()
        if counts == self._versions:
            return []
        pairs = enumerate(zip(counts, self._versions, strict=True))
        return [index for index, (now, then) in pairs if now != then]

    def remember(self, parameter: int | None = None) -> None:
        """Take the weights as they are for our own; nothing of ours may be on its way to them."""
        if parameter is None:
            self._versions = self._count()
        else:
            self._versions[parameter] = self._parameters[parameter]._version

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def _same_memory(parameter: Tensor, place: Tensor) -> bool:
    if parameter.device != place.device:
        return False
    return parameter.is_set_to(place)


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device} at {tensor.data_ptr():#x}"


def changed_elements(weight: Tensor, master: Tensor) -> Tensor:
    """A mask, on the master's device, of where ``weight`` is not ``master`` rounded, bit by bit."""
    whole = torch.int32 if weight.dtype.itemsize == 4 else torch.int16
    return weight.to(master.device).view(whole) != master.to(weight.dtype).view(whole)
