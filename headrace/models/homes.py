"""Which weights of a model live off the device, and how they come to their home for the first time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import UserError
from headrace.memory.tiers import Tiers
from headrace.memory.weights import NAMES, DiskWeights, HostWeights, WeightStore
from headrace.schedule.action import Unit
from headrace.schedule.layout import Layout, Parameter, cut

INPUT, OUTPUT = Unit("e", 0), Unit("e", 1)


def streamed_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model, in the order of its forward.

    Raises:
        UserError: a model without layers that can be recomputed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers of a kind that can be streamed: set memory.weights=device "
            "and memory.activations=recompute"
        )
    return list(layers)


def streamed_units(model: PreTrainedModel) -> dict[Unit, list[nn.Module]]:
    """The parts of a model whose weights come and go: its layers, its input and its output embedding.

    Raises:
        UserError: a model without layers that can be recomputed.
    """
    layers = streamed_layers(model)
    units: dict[Unit, list[nn.Module]] = {INPUT: [model.get_input_embeddings()]}
    units |= {Unit("l", index): [layer] for index, layer in enumerate(layers)}
    head = model.get_output_embeddings()
    tied = head.weight is units[INPUT][0].weight
    units[INPUT if tied else OUTPUT] = [*units.get(INPUT if tied else OUTPUT, []), head]
    return units


def streamed_layout(model: PreTrainedModel, capacity: int) -> Layout:
    """The parameters that are streamed, cut into buckets: matrices of the model's dtype in its units.

    Norms and biases stay on the device: they are small, and most of them do not decay.

    Args:
        model: its parameters may be on the meta device.
        capacity: elements of the largest bucket.
    """
    unit_of = {
        id(parameter): unit
        for unit, modules in streamed_units(model).items()
        for module in modules
        for parameter in module.parameters()
        if parameter.ndim >= 2 and parameter.dtype == model.dtype
    }
    dtype = NAMES[model.dtype]
    return cut(
        [
            Parameter(name, parameter.numel(), 0, dtype, unit_of[id(parameter)])
            for name, parameter in model.named_parameters()
            if id(parameter) in unit_of
        ],
        capacity,
    )


def weight_store(
    model: PreTrainedModel, tiers: Tiers, where: Literal["host", "disk"], bucket: int
) -> WeightStore:
    """An empty home for the parameters that are streamed, in host memory or on the disk.

    Args:
        model: its parameters may be on the meta device.
        tiers: hand out the memory, or the disk.
        where: the tier.
        bucket: elements of the largest bucket.

    Raises:
        UserError: a budget too small, a model that cannot be streamed.
    """
    layout = streamed_layout(model, bucket)
    if where == "host":
        return HostWeights(layout, tiers.pool)
    assert tiers.disk is not None
    return DiskWeights(layout, tiers.pool, tiers.disk)


class Filling:
    """Puts parameters into their store for the first time, without holding more than a bucket.

    Use it as a context; :meth:`views` for one parameter after the other, in :attr:`order`.

    Args:
        store: the home of the parameters.
        device: of the placeholders.
    """

    def __init__(self, store: WeightStore, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._index = {parameter.name: i for i, parameter in enumerate(store.layout.parameters)}
        self._open: tuple[int, AbstractContextManager[Tensor], Tensor] | None = None

    @property
    def order(self) -> list[str]:
        """The parameters' names in the order in which they fill the buckets."""
        return list(reversed(self._index))

    def views(self, name: str) -> Iterator[Tensor]:
        """A parameter's places, 1-D, in element order; each is taken when the next one is asked for."""
        for bucket, s in self._store.layout.places(self._index[name]):
            yield self._bucket(bucket)[s.offset : s.end]

    def fill(self, name: str, value: Tensor) -> None:
        """Put a whole parameter into its places."""
        rest = value.reshape(-1)
        for view in self.views(name):
            view.copy_(rest[: view.numel()])
            rest = rest[view.numel() :]

    def placeholder(self, parameter: Tensor) -> Tensor:
        """What stands for a parameter while it is not on the device: its shape, in the memory of a number."""
        return torch.zeros(1, dtype=parameter.dtype, device=self._device).expand(parameter.shape)

    def __enter__(self) -> "Filling":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open is not None:
            self._open[1].__exit__(*error)
            self._open = None

    def _bucket(self, index: int) -> Tensor:
        if self._open is None or self._open[0] != index:
            self.__exit__(None, None, None)
            visit = self._store.visited(index, write=True)
            self._open = index, visit, visit.__enter__()
        return self._open[2]


class Rest:
    """What is left of a run of 1-D tensors, taken in stretches of any length; each only when it is due."""

    def __init__(self, views: Iterator[Tensor]) -> None:
        self._views = views
        self._left = torch.empty(0)

    def take(self, count: int) -> Iterator[Tensor]:
        """The next ``count`` elements."""
        while count:
            if not self._left.numel():
                self._left = next(self._views)
            piece, self._left = self._left[:count], self._left[count:]
            count -= piece.numel()
            yield piece


def move_out(model: PreTrainedModel, store: WeightStore) -> None:
    """Move the parameters of a model that is in memory into their store."""
    parameters = dict(model.named_parameters())
    with Filling(store, model.device) as filling:
        for name in filling.order:
            filling.fill(name, parameters[name].detach())
            parameters[name].data = filling.placeholder(parameters[name])
