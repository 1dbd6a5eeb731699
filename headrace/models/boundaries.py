"""Layer inputs off the device: what recomputation starts from waits in host memory or on the disk.

With layers recomputed in backward, all that autograd keeps of a layer is its input (Chen et al. 2016). It
leaves after the layer's forward and comes back one layer ahead of its backward (Rajbhandari et al. 2021,
ZeRO-Infinity, section 5.1.2). Those of the last layers never leave the memory that others pass through:
their backward comes first.

Shapes: B rows, L positions, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from headrace.lanes.lanes import Event
from headrace.memory.parts import Form
from headrace.memory.tiers import Tiers
from headrace.models.recompute import Checkpoint
from headrace.schedule.action import Action, Kind, Unit

SLOTS = 2
"""Inputs in memory at once on their way to and from the disk: one that is used, one that moves."""

TABLE = "input"
"""The one table of a layer input's file."""


class Boundaries:
    """Keeps the inputs of a model's layers in another tier from their forward until their backward.

    Args:
        layers: in the order of the forward; each runs once in it.
        numel: elements of the largest input, B * L * D.
        dtype: of the inputs.
        tiers: pools, disk and lanes.
        where: the tier; ``"host"`` is another one than the device's only where these are apart.

    Attributes:
        instead: of each layer, for :func:`~headrace.models.recompute.recompute_layers`.

    Raises:
        UserError: a budget has no room.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        numel: int,
        dtype: torch.dtype,
        tiers: Tiers,
        where: Literal["host", "disk"],
    ) -> None:
        self._count = len(layers)
        self._numel = numel
        self._tiers = tiers
        self._lanes = tiers.lanes
        self._on_disk = where == "disk"
        self._stays = max(0, len(layers) - SLOTS) if self._on_disk else 0  # the first that never leaves
        what = "inputs of layers (memory.activations)"
        count = min(SLOTS, len(layers)) if self._on_disk else len(layers)
        room = -(-numel // _WHOLE) * _WHOLE
        # Those that come and go are no activations by autograd's count, which is kept apart.
        purpose = "buffers" if self._on_disk else "activations"
        self._slots = [tiers.pool.take(room, dtype, purpose, what) for _ in range(count)]
        self._returned: list[Tensor] = []
        if tiers.apart:
            self._returned = [
                tiers.device_pool.take(room, dtype, "buffers", what) for _ in range(min(SLOTS, len(layers)))
            ]
        self._shapes: dict[int, torch.Size] = {}
        self._left: list[list[Event]] = [[] for _ in range(count)]  # ends of what was last sent from a slot
        self._here: dict[int, list[Event]] = {}  # layer -> ends of what brings its input into its slot
        self._back: dict[int, list[Event]] = {}  # the same, of where it is computed with
        if self._on_disk:
            assert tiers.disk is not None
            for index in range(self._stays):
                tiers.disk.declare(_name(index), Form({TABLE: dtype}, numel), index)
            tiers.disk.reserve(1, "activations", what)
        self.instead: Mapping[nn.Module, Checkpoint] = {
            layer: partial(self._checkpoint, index) for index, layer in enumerate(layers)
        }

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory in which inputs are while they are used."""
        return [memory.untyped_storage() for memory in (self._returned or self._slots)]

    def close(self) -> None:
        """Give the memory back."""
        while self._slots:
            self._tiers.pool.give_back(self._slots.pop())
        while self._returned:
            self._tiers.device_pool.give_back(self._returned.pop())

    def _checkpoint(self, index: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """torch's checkpoint, whose saved input goes away in between."""

        own = _memory(args[0])  # not the input itself: autograd keeps both functions

        def pack(tensor: Tensor) -> Any:
            return self._leave(index, tensor) if _memory(tensor) == own else tensor

        def unpack(saved: Any) -> Tensor:
            return self._come(index, saved) if isinstance(saved, torch.Size) else saved

        with saved_tensors_hooks(pack, unpack):
            return checkpoint(function, *args, **options)

    def _leave(self, index: int, x_BLD: Tensor) -> torch.Size:
        """Send a layer's input away; returns its shape."""
        assert x_BLD.numel() <= self._numel, (x_BLD.shape, self._numel)
        slot, x_BLD = self._slot(index), x_BLD.detach()
        for event in self._left[slot]:
            self._lanes.wait(event)
        memory = self._slots[slot][: x_BLD.numel()]

        def down() -> int:
            memory.copy_(x_BLD.reshape(-1), non_blocking=True)
            return x_BLD.nbytes

        ended = [self._lanes.submit(Action(Kind.DOWN, unit=Unit("a", index)), down)]
        self._shapes[index] = x_BLD.shape
        self._back.pop(index, None)
        self._here = {i: events for i, events in self._here.items() if self._slot(i) != slot}
        if index < self._stays:
            ended = self._each_path(Kind.WRITE, index, ended)
        else:
            self._here[index] = ended
        self._left[slot] = ended
        return x_BLD.shape

    def _come(self, index: int, shape: torch.Size) -> Tensor:
        """A layer's input again; that of the layer before it is on its way meanwhile."""
        for wanted in (index, index - 1):
            if wanted >= 0 and wanted not in self._back:
                self._back[wanted] = self._bring(wanted)
        for event in self._back[index]:
            self._lanes.wait(event)
        memory = self._returned[index % SLOTS] if self._returned else self._slots[self._slot(index)]
        return memory[: shape.numel()].view(shape)

    def _bring(self, index: int) -> list[Event]:
        """Submit what brings a layer's input back, into memory that layers behind it have left."""
        slot = self._slot(index)
        if index not in self._here:
            self._here = {i: events for i, events in self._here.items() if self._slot(i) != slot}
            self._here[index] = self._each_path(Kind.READ, index, self._left[slot])
        if not self._returned:
            return self._here[index]
        numel = self._shapes[index].numel()
        source, target = self._slots[slot][:numel], self._returned[index % SLOTS][:numel]

        def up() -> int:
            target.copy_(source, non_blocking=True)
            return target.nbytes

        return [self._lanes.submit(Action(Kind.UP, unit=Unit("a", index)), up, self._here[index])]

    def _slot(self, index: int) -> int:
        return index % len(self._slots)

    def _each_path(self, kind: Kind, index: int, after: Sequence[Event]) -> list[Event]:
        disk, memory = self._tiers.disk, self._slots[self._slot(index)]
        assert disk is not None
        move = disk.read if kind is Kind.READ else disk.write
        return [
            self._lanes.submit(
                Action(kind, unit=Unit("a", index), path=path),
                partial(move, _name(index), path, {TABLE: memory}),
                after,
            )
            for path in range(len(disk.paths))
        ]


_WHOLE = 2**11  # elements that fill whole blocks of the disk in any dtype


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _name(index: int) -> str:
    return f"activations-l{index:05}"
