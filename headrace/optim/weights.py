"""The working weights: where they lie, and whether somebody else wrote to them since our last write."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.memory.weights import WeightStore
from headrace.schedule.layout import Bucket


class WorkingWeights:
    """The trained parameters of a model: flat views, or their home where they are off the device.

    torch counts in-place writes to a tensor; a count that is not the one at :meth:`remember` means that
    somebody else wrote. Writes through ``parameter.data`` or numpy are not counted. To weights that are off
    the device nobody else writes.

    Args:
        named: parameters in the order of the layout, contiguous unless they are off the device.
        off: the home of those that are; its buckets are the first of the layout's.

    Attributes:
        flat: 1-D views of the others by their number, which share their memory and their counts.
    """

    def __init__(self, named: Mapping[str, Tensor], off: WeightStore | None = None) -> None:
        self.off = off
        streamed = {parameter.name for parameter in off.layout.parameters} if off else set()
        here = {i: name for i, name in enumerate(named) if name not in streamed}
        self._names = list(named)
        self._parameters = {i: named[name] for i, name in here.items()}
        # They keep the memory alive, so that nothing else can take its place at the same address.
        self._places = {i: parameter.detach() for i, parameter in self._parameters.items()}
        self.flat = {i: place.view(-1) for i, place in self._places.items()}
        self._versions = self._count()

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._names)

    @contextmanager
    def visited(self, bucket: Bucket, *, write: bool) -> Iterator[list[Tensor]]:
        """The weights of a bucket's segments, 1-D, for a while in which nothing is on its way to them.

        Args:
            write: whether all of them are changed.
        """
        if self.off is None or bucket.unit is None:
            yield [self.flat[s.parameter][s.start : s.stop] for s in bucket.segments]
            return
        with self.off.visited(bucket.index, write=write) as weights:
            yield [weights[s.offset : s.end] for s in bucket.segments]

    def check_places(self) -> None:
        """Raise UserError if a parameter is not in the memory any more in which it was at the start."""
        for index, place in self._places.items():
            name, parameter = self._names[index], self._parameters[index]
            if not _same_memory(parameter, place):
                raise UserError(
                    f"{name} was moved or replaced since OffloadedAdamW was built ({_described(place)} then, "
                    f"{_described(parameter)} now): give the model its last device, dtype and memory first, "
                    "then build the optimizer"
                )

    def written(self, parameter: int | None = None) -> list[int]:
        """The parameters, or whether this one, that somebody else may have written to."""
        indices = self._parameters if parameter is None else self._parameters.keys() & {parameter}
        return [index for index in indices if self._parameters[index]._version != self._versions[index]]

    def remember(self, parameter: int | None = None) -> None:
        """Take the weights as they are for our own; nothing of ours may be on its way to them."""
        if parameter is None:
            self._versions = self._count()
        elif parameter in self._parameters:
            self._versions[parameter] = self._parameters[parameter]._version

    def _count(self) -> dict[int, int]:
        return {index: parameter._version for index, parameter in self._parameters.items()}


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
