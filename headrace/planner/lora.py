"""Low-rank adapters beside frozen matrices (LoRA, Hu et al. 2021): which have one, and its parameters.

Names are those that PEFT gives them inside a model.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UserError
from headrace.planner.parameters import GPT2, ParameterShape, Table

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but the output matrix."""

Targets = Literal["all-linear"] | Sequence[str]
"""Which linear layers have an adapter: all, or those whose dotted name is or ends in one of the names."""

_SUFFIX = ".weight"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        rank: rows of A and columns of B.
        modules: the linear layers beside which they stand, by dotted name, in the model's order.
    """

    rank: int
    modules: tuple[str, ...]

    def parameters(self, base: Sequence[ParameterShape], table: Table) -> Iterator[ParameterShape]:
        """Name and shape of every A [rank, inputs] and B [outputs, rank]; ``base`` are the frozen ones."""
        shapes = {parameter.name.removesuffix(_SUFFIX): parameter.shape for parameter in base}
        for module in self.modules:
            outputs, inputs = shapes[module] if table is not GPT2 else shapes[module][::-1]
            yield ParameterShape(f"{module}.lora_A.default.weight", (self.rank, inputs))
            yield ParameterShape(f"{module}.lora_B.default.weight", (outputs, self.rank))


def linear_layers(base: Sequence[ParameterShape], table: Table) -> list[str]:
    """The linear layers of a decoder's layers; of a mixture of experts those of its attention."""
    return [
        parameter.name.removesuffix(_SUFFIX)
        for parameter in base
        if parameter.name.startswith(f"{table.prefix}.")
        and parameter.name.endswith(_SUFFIX)
        and len(parameter.shape) == 2
        and not (table.sparse and ".mlp." in parameter.name)
    ]


def choose(targets: Targets, linear: Sequence[str]) -> tuple[str, ...]:
    """Those of the linear layers that ``targets`` name, as PEFT matches names.

    Raises UserError for a name that matches none, with the one that was perhaps meant.
    """
    if targets == ALL_LINEAR:
        return tuple(linear)
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            raise UserError(f"model.lora.targets={target} {_complaint(target, linear)}")
    return tuple(name for name in linear if any(_is_named(name, target) for target in targets))


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _complaint(target: str, linear: Sequence[str]) -> str:
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    names = {".".join(name.split(".")[-count:]): None for name in linear for count in range(1, 7)}
    close = difflib.get_close_matches(target, names, n=1, cutoff=0.6)
    meant = f"did you mean {close[0]}?" if close else f"write {ALL_LINEAR}, or some of {', '.join(leaves)}"
    return f"names no linear layer inside the model's decoder: {meant}"
