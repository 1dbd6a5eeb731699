"""Measures the activations of a model: the storages that autograd keeps between forward and backward."""

import traceback
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class ActivationMeter:
    """Peak bytes of the unique storages that autograd holds for backward, parameters and buffers apart.

    Enter it around the forward and backward of a micro-batch; results keep every bit::

        meter = ActivationMeter(model)
        recompute_layers(model, meter.contexts)  # only when layers are recomputed
        with meter:
            model(**batch).loss.backward()
        meter.peak

    A storage counts once, from the first time that autograd saves it until autograd lets go of it. What a
    recomputed layer saves is hidden from hooks around it (checkpointing installs its own), so while
    a layer is recomputed every new storage is watched, and those that outlive the recomputation are counted.

    Args:
        model: parameters and buffers do not count.
        beside: further memory that does not, such as that in which streamed weights are.

    Attributes:
        peak: highest bytes held at one time in all uses so far.
    """

    def __init__(self, model: nn.Module, beside: Sequence[torch.UntypedStorage] = ()) -> None:
        self.peak = 0
        self._model = model
        self._beside = frozenset(storage.data_ptr() for storage in beside)
        self._resident: frozenset[int] = frozenset()
        self._owners: Counter[int] = Counter()  # address of a storage -> objects that hold it
        self._references: set[weakref.ref] = set()
        self._held = 0
        self._hooks = saved_tensors_hooks(self._save, _unchanged)
        self._entered = False

    def __enter__(self) -> "ActivationMeter":
        tensors = (*self._model.parameters(), *self._model.buffers())
        self._resident = self._beside | {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._hooks.__enter__()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self._hooks.__exit__(*error)

    def contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """For ``context_fn`` of ``torch.utils.checkpoint``: costs nothing unless the meter is entered."""
        return nullcontext(), _Recomputation(self) if self._entered else nullcontext()

    def _save(self, tensor: Tensor) -> Tensor:
        # Detached: a node that saved its own output would otherwise own itself. The new tensor object lives
        # exactly as long as autograd keeps what was saved.
        saved = tensor.detach()
        self.hold(saved, saved.untyped_storage())
        self.mark()
        return saved

    def hold(self, owner: object, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` for as long as ``owner`` lives."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes == 0 or address in self._resident:
            return
        if not self._owners[address]:
            self._held += nbytes
        self._owners[address] += 1
        self._references.add(weakref.ref(owner, partial(self._release, address, nbytes)))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is counted now."""
        return storage.data_ptr() in self._owners

    def mark(self) -> None:
        """Raise the peak to what is held now."""
        self.peak = max(self.peak, self._held)

    def _release(self, address: int, nbytes: int, reference: weakref.ref) -> None:
        self._references.discard(reference)
        self._owners[address] -= 1
        if not self._owners[address]:
            del self._owners[address]
            self._held -= nbytes


class _Recomputation(TorchDispatchMode):
    """Watches the storages made while a layer is recomputed."""

    def __init__(self, meter: ActivationMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and not self._meter.holds(storage := tensor.untyped_storage()):
                self._meter.hold(storage, storage)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        # The recomputation is left by an exception as soon as the last saved tensor is there. Its frames
        # hold temporaries, which are freed anyway once it is handled; what remains is what was saved.
        traceback.clear_frames(trace)
        self._meter.mark()


def _unchanged(saved: Tensor) -> Tensor:
    return saved
