"""Bytes that autograd saves between forward and backward, operation by operation, for transformers' layers.

The unit is the unique storage: what several operations save of one tensor counts once, parameters and buffers
never. Every term below is one such storage; tests hold their sum against measurement.
"""

from functools import cached_property
from itertools import accumulate

from headrace.machine.machine import Machine
from headrace.planner.shape import ACTIVATIONS, ModelShape
from headrace.planner.workload import Workload, round_length

FP32 = 4
INT32 = 4
INT64 = 8


class SavedBytes:
    """What one micro-batch saves.

    Args:
        shape: the model.
        work: the step.
        machine: on a CPU, 16-bit attention computes documents at round lengths, on copies.
    """

    def __init__(self, shape: ModelShape, work: Workload, machine: Machine) -> None:
        self._shape = shape
        self._work = work
        self._element = work.element
        self._tokens = work.tokens
        self._on_cpu = machine.unified
        self._rounds = machine.unified and work.element < FP32
        self._recomputed = work.activations != "keep"
        self._away = work.activations in ("host", "disk")  # inputs of layers, which count there
        self._queries = shape.heads * shape.head_dim
        self._keys = shape.kv_heads * shape.head_dim

    @property
    def peak(self) -> int:
        """Highest bytes held at one time."""
        return max(self.after_forward, *self.in_backward)

    @property
    def after_forward(self) -> int:
        """Bytes held when forward has ended."""
        layers = self._shape.layers * [self._kept] if self._recomputed else self._layers
        return self._around + sum(layers) + self._norm(self._shape.hidden) + self._balance()

    @property
    def in_backward(self) -> list[int]:
        """For each layer, the bytes held when backward reaches it, later layers being done."""
        if not self._recomputed:
            return [self._around + below for below in accumulate(self._layers)]
        kept = accumulate(self._shape.layers * [self._kept])
        shared = self._shared_input
        return [
            self._around + below + layer - shared for below, layer in zip(kept, self._layers, strict=True)
        ]

    @cached_property
    def _layers(self) -> list[int]:
        return [self._layer(index) for index in range(self._shape.layers)]

    @property
    def _stream(self) -> int:
        """A tensor of the residual stream's width, such as a layer's input."""
        return self._tokens * self._shape.hidden * self._element

    @property
    def _kept(self) -> int:
        """A layer's input where it waits in autograd's memory for backward."""
        return 0 if self._away else self._stream

    @property
    def _around(self) -> int:
        """Beside the layers: the indices that the embeddings save, cosines and sines."""
        shape = self._shape
        element = FP32 if shape.family.wide_rotary else self._element
        indices = INT64 * ((2 if shape.positions else 1) + (self._work.embeddings == "rows"))
        return self._tokens * (indices + 2 * shape.rotary * element * shape.rotary_kinds)

    @property
    def _shared_input(self) -> int:
        """Bytes of a layer's input where its own operations save it without a copy, as checkpointing does."""
        family = self._shape.family
        saved = family.root == "layer" or (self._element == FP32 and family.root != "centred")
        return self._stream if saved or family.norms == "after" else 0

    def _layer(self, index: int) -> int:
        """Bytes that a layer's operations save, its input included where one of them saves it."""
        block = self._experts() if index in self._shape.sparse else self._mlp()
        return self._norms() + self._head_norms() + self._attention(index) + self._mask(index) + block

    def _norms(self) -> int:
        """The layer's norms, and the two tensors of the stream's width that enter matrices."""
        family, norm = self._shape.family, self._norm(self._shape.hidden)
        if not self._shape.parallel:
            return (4 if family.norms == "both" else 2) * norm + 2 * self._stream
        if family.norms == "shared":
            return norm + self._stream
        # Both norms save the layer's input, which torch's LayerNorm keeps without a copy.
        return 2 * norm - self._stream + 2 * self._stream

    def _norm(self, width: int, heads: int = 1) -> int:
        """A norm over ``width``: what is saved for each element, and for each token."""
        root, element = self._shape.family.root, self._element
        if (
            root == "layer"
        ):  # its input, the mean and the inverse root, which a CPU keeps in the input's dtype
            return self._tokens * heads * (width * element + 2 * (element if self._on_cpu else FP32))
        if root == "centred":  # twice the centred input, the inverse root, and what the weight multiplies
            weight = 0 if element == FP32 else FP32 * width
            return self._tokens * heads * (3 * width * FP32 + FP32) + weight
        # The input in fp32, the inverse roots, and what the weight multiplies.
        normed = element if root == "cast" else FP32
        weight = FP32 * width if root == "float" else 0  # 1 + weight, computed in fp32
        return self._tokens * heads * (width * (FP32 + normed) + FP32) + weight

    def _head_norms(self) -> int:
        shape = self._shape
        if shape.family.head_norm == "all":
            return self._norm(self._queries) + self._norm(self._keys)
        if shape.family.head_norm == "head":
            return self._norm(shape.head_dim, shape.heads) + self._norm(shape.head_dim, shape.kv_heads)
        return 0

    def _attention(self, index: int) -> int:
        """Queries, keys and values, what attention makes of them, and its result."""
        return self._inputs(index) + self._scores() + self._joined

    @property
    def _joined(self) -> int:
        """The copy of attention's result that enters the next matrix, where there is one."""
        shape, whole = self._shape, self._work.whole_rows
        # Documents are joined by a copy; heads are reordered by one where a part of each was rotated and
        # joined to the rest.
        copied = not whole or shape.family.rotary is not None or shape.softcap is not None
        return self._tokens * self._queries * self._element if copied else 0

    def _inputs(self, index: int) -> int:
        """Queries, keys and values, and copies of those of documents that are not of a round length."""
        apart = self._queries + 2 * self._keys
        width = apart
        if self._shape.family.fused and self._shape.rotary:  # a slice of one fused projection holds all of it
            width += self._queries + self._keys
        if not self._on_cpu and self._is_narrow(index):
            width = 3 * self._queries  # no CUDA kernel takes a mask and grouped heads: they are repeated
        lengths = self._work.documents
        if self._work.whole_rows or not self._rounds:
            return self._tokens * width * self._element
        if (
            lengths is None
        ):  # the originals stay if any document is of a round length: half of them are planned
            return self._tokens * (width // 2 + apart) * self._element
        copied = [round_length(n) for n in lengths if round_length(n) != n]
        originals = self._tokens * width if len(copied) < len(lengths) else 0
        return (originals + sum(copied) * apart) * self._element

    @property
    def _computed(self) -> list[int]:
        """Positions that attention computes, call by call; as many as a row has where that is not known."""
        work = self._work
        if work.whole_rows or work.documents is None:
            return [work.context] * work.micro_batch
        return [round_length(n) if self._rounds else n for n in work.documents]

    def _scores(self) -> int:
        """What attention itself keeps: its result and the logarithms of its sums, or scores written out."""
        shape, element = self._shape, self._element
        if shape.softcap is None:
            return sum(self._computed) * (self._queries * element + shape.heads * FP32)
        # tanh, softmax in fp32, and the softmax in bf16 where that is another tensor.
        weights = element + (FP32 if element == FP32 else FP32 + element)
        return sum(n * n for n in self._computed) * shape.heads * weights

    def _mask(self, index: int) -> int:
        """The band of a layer with a window or a cap; layers of a kind share it, and the first counts."""
        shape, context = self._shape, self._work.context
        side = round_length(context) if self._rounds else context
        if shape.softcap is not None:  # added to scores: kept, but not saved
            counted = self._recomputed
        else:
            first = index == shape.kinds.index(shape.kinds[index])
            counted = self._is_narrow(index) and (self._recomputed or first)
        return side**2 * self._element if counted else 0

    def _is_narrow(self, index: int) -> bool:
        window = self._shape.window if self._shape.kinds[index] == "sliding_attention" else None
        return window is not None and window < self._work.longest

    def _mlp(self) -> int:
        """What the activation keeps and makes; with a gate, the other matrix's result and the product too."""
        tensors = (4 if self._shape.family.gated else 2) + ACTIVATIONS[self._shape.activation]
        return tensors * self._tokens * self._shape.intermediate * self._element

    def _balance(self) -> int:
        """What the loss that balances the experts keeps: probabilities, and the choices of two layers."""
        shape, experts = self._shape, self._shape.experts
        if experts is None or not experts.balanced:
            return 0
        layers, choices = len(shape.sparse), self._tokens * experts.chosen * INT64
        return layers * self._tokens * experts.count * self._element + min(layers, 2) * choices

    def _experts(self) -> int:
        """The router and the grouped matrix products of the chosen experts (transformers' ``grouped_mm``)."""
        shape, experts = self._shape, self._shape.experts
        assert experts is not None
        pairs = self._tokens * experts.chosen
        score = self._element if shape.family.rounded_scores else FP32
        rows = pairs * (2 * shape.hidden + 4 * experts.width) * self._element
        order = pairs * (3 * INT64 + score) + experts.count * INT32  # two permutations, tokens, offsets
        probabilities = self._tokens * experts.count * FP32 + pairs * INT64
        # Divided in place by their sum: both are saved.
        sums = (pairs + self._tokens) * FP32 if experts.normalised else 0
        return rows + order + probabilities + sums
