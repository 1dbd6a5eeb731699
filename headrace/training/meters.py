"""What a session measures in its first steps: activations, and what the loss allocates."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headrace.training.activations import ActivationMeter


class AllocationMeter(TorchDispatchMode):
    """Peak bytes of the storages that are made while it is entered, from then until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._meter = ActivationMeter(nn.Module())

    @property
    def peak(self) -> int:
        """Highest bytes held at one time in all uses so far."""
        return self._meter.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_iter(result):
            if isinstance(value, Tensor) and _address(value) not in given:
                storage = value.untyped_storage()
                if not self._meter.holds(storage):
                    self._meter.hold(storage, storage)
        self._meter.mark()
        return result


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Meters:
    """The meters of a session; entering one never changes a bit of the results.

    Attributes:
        activations: what autograd keeps for backward.
        logits: what the loss allocates, the gradients that it hands on included.
    """

    def __init__(self, model: nn.Module, beside: Sequence[UntypedStorage] = ()) -> None:
        self.activations = ActivationMeter(model, beside)
        self.logits = AllocationMeter()
