"""Bytes that autograd saves where adapters are trained beside frozen matrices.

A frozen matrix needs no input for a gradient of its own, a frozen norm none of what it multiplies, and before
the first adapter nothing is saved at all. Each adapter saves its matrix's input and its own product, which is
``rank`` wide.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from headrace.machine.machine import Machine
from headrace.planner.activations import FP32, INT64, SavedBytes
from headrace.planner.shape import ACTIVATIONS, ModelShape
from headrace.planner.workload import Workload

_LAST = frozenset(("o_proj", "dense", "c_proj", "down_proj", "fc2", "dense_4h_to_h"))
"""Matrices that read what their block has made; all others read the stream."""


def saved_bytes(shape: ModelShape, work: Workload, machine: Machine) -> SavedBytes:
    """What a micro-batch saves, of a model that is trained itself or has adapters."""
    return SavedBytes(shape, work, machine) if shape.adapters is None else _AdapterBytes(shape, work, machine)


@dataclass(frozen=True)
class _Layer:
    """Where gradients flow in a layer.

    Attributes:
        index: of the layer.
        reached: whether its input needs a gradient: there are adapters before it.
        attention: names of attention's matrices with an adapter.
        mlp: names of the mlp's matrices with an adapter.
        parallel: whether the mlp reads what attention reads.
    """

    index: int
    reached: bool
    attention: frozenset[str]
    mlp: frozenset[str]
    parallel: bool

    @property
    def reads(self) -> bool:
        """Whether an adapter reads attention's input."""
        return bool(self.attention - _LAST)

    @property
    def attends(self) -> bool:
        """Whether attention itself has a backward."""
        return self.reached or self.reads

    @property
    def attended(self) -> bool:
        """Whether attention's result on the stream needs a gradient."""
        return self.attends or bool(self.attention)

    @property
    def entered(self) -> bool:
        """Whether the mlp's input needs a gradient."""
        return self.reached if self.parallel else self.reached or self.attended

    @property
    def left(self) -> bool:
        """Whether the layer's result needs a gradient."""
        return self.entered or self.attended or bool(self.mlp)


class _AdapterBytes(SavedBytes):
    @cached_property
    def _flow(self) -> list[_Layer]:
        shape, reached = self._shape, False
        flow: list[_Layer] = []
        assert shape.adapters is not None
        for index in range(shape.layers):
            prefix = f"{shape.family.table.prefix}.{index}."
            inside = [m.removeprefix(prefix) for m in shape.adapters.modules if m.startswith(prefix)]
            attention, mlp = (
                frozenset(name.rpartition(".")[2] for name in inside if name.startswith("mlp.") == wanted)
                for wanted in (False, True)
            )
            flow.append(_Layer(index, reached, attention, mlp, shape.parallel))
            reached = flow[-1].left
        return flow

    @property
    def after_forward(self) -> int:
        """Bytes held when forward has ended."""
        last = self._balance() + (self._norm(self._shape.hidden) if self._flow[-1].left else 0)
        if self._recomputed:
            return sum(self._streams) + last
        return self._around + sum(self._layers) + last

    @property
    def in_backward(self) -> list[int]:
        """For each layer, the bytes held when backward reaches it, later layers being done."""
        if not self._recomputed:
            return [self._around + below for below in accumulate(self._layers)]
        kept = accumulate(self._streams)
        shared = [self._shared(layer) for layer in self._flow]
        return [self._around + k + own - s for k, own, s in zip(kept, self._layers, shared, strict=True)]

    @property
    def _streams(self) -> list[int]:
        """The inputs that recomputed layers keep; one without a backward keeps none."""
        return [self._kept if layer.left else 0 for layer in self._flow]

    @property
    def _around(self) -> int:
        """Cosines and sines, which enter every recomputed layer; a frozen embedding saves no indices."""
        indices = INT64 * (2 if self._shape.positions else 1)
        rotates = self._recomputed or any(
            layer.reached or layer.attention - _LAST - {"v_proj"} for layer in self._flow
        )
        return super()._around - self._tokens * indices if rotates else 0

    def _shared(self, layer: _Layer) -> int:
        if self._shape.family.norms == "after":
            return self._stream if layer.reads else 0
        return self._shared_input if layer.reached else 0

    def _layer(self, index: int) -> int:
        layer = self._flow[index]
        if not layer.left:
            return 0
        return (
            self._around_blocks(layer) + self._attended(layer) + self._second(layer) + self._low_rank(layer)
        )

    def _around_blocks(self, layer: _Layer) -> int:
        """The layer's norms where gradients flow through them, and the tensors that adapters read."""
        family, norm = self._shape.family, self._norm(self._shape.hidden)
        reads, enters = layer.reads, bool(layer.mlp - _LAST)
        before, between = layer.reached, layer.entered
        behind = (layer.attended, layer.entered or bool(layer.mlp))
        if self._shape.parallel:
            if family.norms == "shared":
                return before * norm + (reads or enters) * self._stream
            return before * (2 * norm - self._stream) + (reads + enters) * self._stream
        count = {"before": before + between, "after": sum(behind), "both": before + between + sum(behind)}
        return count.get(family.norms, before + between) * norm + (reads + enters) * self._stream

    def _norm(self, width: int, heads: int = 1) -> int:
        """A frozen norm: as one that is trained, without what its weight multiplies."""
        root, element = self._shape.family.root, self._element
        if root == "layer":
            return super()._norm(width, heads)
        normed = element if root == "cast" else FP32
        return super()._norm(width, heads) - self._tokens * heads * width * normed

    def _attended(self, layer: _Layer) -> int:
        """What attention saves, its result for the adapter that reads it, and norms of heads."""
        last = bool(layer.attention & _LAST)
        if not layer.attends:
            entered = self._tokens * self._queries * self._element if last else 0
            return entered + (self._mask(layer.index) if self._recomputed else 0)
        saved = self._attention(layer.index) + self._mask(layer.index) - (0 if last else self._joined)
        return saved + self._heads(layer)

    def _heads(self, layer: _Layer) -> int:
        if layer.reached or {"q_proj", "k_proj"} <= layer.attention:
            return self._head_norms()
        shape = self._shape
        heads = ("q_proj" in layer.attention, shape.heads), ("k_proj" in layer.attention, shape.kv_heads)
        whole = shape.family.head_norm == "all"
        sizes = [(n * shape.head_dim, 1) if whole else (shape.head_dim, n) for adapted, n in heads if adapted]
        return sum(self._norm(*size) for size in sizes) if shape.family.head_norm != "none" else 0

    def _mask(self, index: int) -> int:
        if self._recomputed:
            return super()._mask(index)
        kinds = self._shape.kinds
        first = next(
            layer.index for layer in self._flow if layer.attends and kinds[layer.index] == kinds[index]
        )
        return super()._mask(kinds.index(kinds[index]) if index == first else index)

    def _second(self, layer: _Layer) -> int:
        """The mlp or the experts."""
        if layer.index in self._shape.sparse:
            return self._experts() if layer.entered else 0
        gate = layer.entered or bool(layer.mlp - _LAST - {"up_proj"})
        up = layer.entered or bool(layer.mlp - _LAST - {"gate_proj"})
        made = bool(layer.mlp & _LAST)
        extra = ACTIVATIONS[self._shape.activation]
        if self._shape.family.gated:  # the activation's input, the matrix beside it, the activation's result
            tensors = gate * (2 + extra) + up + made
        else:
            tensors = (gate or up) * (1 + extra) + made
        return tensors * self._tokens * self._shape.intermediate * self._element

    def _experts(self) -> int:
        """The router and the experts, all frozen: what enters a matrix alone is not saved."""
        experts = self._shape.experts
        assert experts is not None
        pairs = self._tokens * experts.chosen
        entering = pairs * (self._shape.hidden + experts.width) * self._element
        return super()._experts() - entering

    def _low_rank(self, layer: _Layer) -> int:
        """The products of all A, each ``rank`` wide."""
        assert self._shape.adapters is not None
        count = len(layer.attention) + len(layer.mlp)
        return count * self._tokens * self._shape.adapters.rank * self._element
