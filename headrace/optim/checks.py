"""What OffloadedAdamW asks of its arguments, each refusal in one sentence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UserError
from headrace.optim.store import NAMES


def check_numbers(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    max_grad_norm: float,
    micro_batches: int,
    bucket: int,
) -> None:
    """Raise UserError for settings that no optimizer can have."""
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(
            f"lr={lr}, eps={eps} and weight_decay={weight_decay} must not be negative, "
            f"and betas={betas} must lie in [0, 1)"
        )
    if not max_grad_norm >= 0:
        raise UserError(f"max_grad_norm={max_grad_norm} must be above zero, or 0 for no clipping")
    if micro_batches < 1:
        raise UserError(f"micro_batches={micro_batches} must be at least 1")
    if bucket < 2**16 or bucket % 2**16:
        raise UserError(f"bucket={bucket} must be a multiple of 65,536 elements")


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise UserError for a parameter that cannot be cut into flat buckets."""
    if parameter.dtype not in NAMES:
        raise UserError(f"{name} is {parameter.dtype}: OffloadedAdamW trains bf16, fp16 and fp32 parameters")
    if not parameter.is_contiguous():
        raise UserError(f"{name} is not contiguous in memory: make it so with .contiguous() before training")


def check_groups(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise UserError unless a saved state has the same param groups."""
    sizes = [[len(group["params"]) for group in groups] for groups in (own, saved)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the saved state has param groups of {sizes[1]} parameters, this optimizer of {sizes[0]}"
        )


def device_of(named: Mapping[str, Tensor]) -> torch.device:
    """The one device of all parameters; UserError if there are several, or no parameter at all."""
    devices = sorted({str(parameter.device) for parameter in named.values()})
    if not devices:
        raise UserError("OffloadedAdamW was given no parameter that requires a gradient")
    if len(devices) > 1:
        raise UserError(
            f"the parameters are on several devices ({', '.join(devices)}): move the model to one"
        )
    return torch.device(devices[0])


def dense(name: str, parameter: Tensor) -> Tensor:
    """The parameter's gradient; UserError if it is sparse."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise UserError(f"{name} has a sparse gradient: build its embedding with sparse=False")
    return gradient
