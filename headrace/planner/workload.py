"""What one training step asks of a model, as far as memory is concerned."""

from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from headrace.errors import UserError
from headrace.schedule.window import WINDOW

ELEMENT = {"bf16": 2, "fp32": 4}
"""Bytes of one element of a training dtype."""


STATE = 3 * 4
"""Bytes of a parameter's optimizer state: master weight and two moments in fp32."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step.

    Attributes:
        context: positions of a row.
        micro_batch: rows of a micro-batch.
        micro_batches: micro-batches whose gradients are summed before an update.
        dtype: of weights, activations and gradients.
        activations: ``keep`` what backward needs, or ``recompute`` each layer; ``host`` and ``disk``
            recompute too, and keep the layers' inputs there.
        weights: where the working weights live.
        embeddings: whether streamed embeddings come whole or by rows.
        states: where master weights and moments live.
        gradients: where they wait for the update.
        documents: tokens of each document of the heaviest micro-batch, None while the data is not known.
            Attention runs document by document unless each is a whole row.
        loss_chunk: tokens whose logits exist at a time.
        bucket: elements of an optimizer bucket.
        staging: buckets of new weights on their way back, where they do not take the gradients' place.
        workers: threads of the optimizer kernel.
        paths: speeds of the disk paths, in any unit; none where nothing lives on a disk.
        window: buckets of such states in host memory at once.
    """

    context: int
    micro_batch: int = 1
    micro_batches: int = 1
    dtype: Literal["bf16", "fp32"] = "bf16"
    activations: Literal["keep", "recompute", "host", "disk"] = "recompute"
    weights: Literal["device", "host", "disk"] = "device"
    embeddings: Literal["whole", "rows"] = "whole"
    states: Literal["host", "disk"] = "host"
    gradients: Literal["host", "disk"] = "host"
    documents: tuple[int, ...] | None = None
    loss_chunk: int = 512
    bucket: int = 2**24
    staging: int = 2
    workers: int = 1
    paths: tuple[float, ...] = ()
    window: int = WINDOW

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT:
            raise UserError(f"model.dtype {self.dtype!r} cannot be planned; these can: {', '.join(ELEMENT)}")
        for name in ("context", "micro_batch", "micro_batches", "loss_chunk", "bucket", "workers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def element(self) -> int:
        """Bytes of one element of the training dtype."""
        return ELEMENT[self.dtype]

    @property
    def tokens(self) -> int:
        """Positions of one micro-batch, padding included."""
        return self.micro_batch * self.context

    @property
    def whole_rows(self) -> bool:
        """Whether every row is known to be one document."""
        return self.documents == (self.context,) * self.micro_batch

    @property
    def longest(self) -> int:
        """Tokens of the longest document, or of a row where that is not known."""
        return self.context if self.documents is None else max(self.documents)

    @property
    def rows(self) -> int:
        """Rows of the whole step."""
        return self.micro_batch * self.micro_batches

    def with_micro_batch(self, rows: int) -> "Workload":
        """The same step cut into micro-batches of ``rows``, which must divide its rows."""
        assert self.rows % rows == 0, (self.rows, rows)
        return replace(self, micro_batch=rows, micro_batches=self.rows // rows, documents=None)


def divisors(number: int) -> list[int]:
    """All divisors of a number above zero, in rising order, in as many steps as its root."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def kernel_lengths(longest: int) -> int:
    """How many lengths :func:`round_length` makes of 1 to ``longest``."""
    count = length = 0
    while length < longest:
        length, count = round_length(length + 1), count + 1
    return count


def round_length(length: int) -> int:
    """The length at which 16-bit attention on a CPU computes ``length`` tokens (memory.shapes)."""
    step = max(16, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
