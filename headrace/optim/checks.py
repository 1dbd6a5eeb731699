"""What OffloadedAdamW asks of its arguments, each refusal in one sentence."""

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.memory.weights import NAMES
from headrace.optim.config import LARGEST
from headrace.optim.kernel import Hyper
from headrace.optim.policies.base import Policy

MOST_WORKERS = 1024
"""More threads than any machine has cores for; each takes 0.63 MiB of scratch."""

HYPERS = ("lr", "betas", "eps", "weight_decay")
"""What a param group must hold."""

_OTHER_METHODS = ("amsgrad", "maximize")  # torch's AdamW has them, its param groups and states carry them


def check_options(
    *,
    max_grad_norm: Any,
    release_gradients: Any,
    micro_batches: Any,
    policy: Any,
    bucket: Any,
    workers: Any,
    ledger: Any,
) -> None:
    """Raise UserError for settings that no optimizer can have; see OffloadedAdamW for what each may be."""
    if not number(max_grad_norm) >= 0:
        raise UserError(f"max_grad_norm={max_grad_norm!r} must be a number above zero, or 0 for no clipping")
    if not isinstance(release_gradients, bool):
        raise UserError(f"release_gradients={release_gradients!r} must be True or False")
    if not _whole(micro_batches) or micro_batches < 1:
        raise UserError(f"micro_batches={micro_batches!r} must be a whole number of at least 1")
    if not _whole(bucket) or bucket < 2**16 or bucket % 2**16:
        raise UserError(f"bucket={bucket!r} must be a multiple of 65,536 elements")
    if workers is not None and not (_whole(workers) and 1 <= workers <= MOST_WORKERS):
        raise UserError(
            f"workers={workers!r} must be a whole number from 1 to {MOST_WORKERS:,}, "
            "or None for all cores of this process"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise UserError(f"policy={policy!r} must be an instance of a Policy, or None for Sync()")
    if ledger is not None and not isinstance(ledger, Ledger):
        raise UserError(f"ledger={ledger!r} must be a Ledger, or None for a new one")


def check_gradients(gradients: Any, on_disk: bool) -> None:
    """Raise UserError unless gradients can wait there; ``on_disk`` says whether there is a disk."""
    if gradients not in ("host", "disk"):
        raise UserError(f"gradients={gradients!r} must be 'host' or 'disk'")
    if gradients == "disk" and not on_disk:
        raise UserError("gradients='disk' needs a place: pass disk={\"a directory\": its budget} too")


def check_ranks(group: Any, weights: Any) -> None:
    """Raise UserError for a group that is none, or that shares what it cannot."""
    if group is not None and not isinstance(group, ProcessGroup):
        raise UserError(f"group={group!r} must be a process group of torch.distributed, or None")
    if group is not None and weights is not None:
        raise UserError("group= and weights= do not go together yet: keep the weights on the device")


def check_places(window: Any, kept: Any) -> None:
    """Raise UserError for numbers of buckets in memory, and of checkpoints, that cannot be."""
    if not _whole(window) or window < 1:
        raise UserError(f"window={window!r} must be a whole number of at least 1")
    if not _whole(kept) or kept < 0:
        raise UserError(f"kept={kept!r} must be a whole number, 0 for none")


def check_group(group: Mapping[str, Any], where: str = "") -> None:
    """Raise UserError unless a param group's AdamW numbers are such that it can train.

    Args:
        where: what follows each value in the sentence, like `` of param group 1``.
    """
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= number(group[name]) <= LARGEST:
            raise UserError(f"{name}={group[name]!r}{where} must be a number from 0 to {LARGEST:g}")
    betas = group["betas"]
    two = isinstance(betas, Sequence) and len(betas) == 2
    if not two or not all(0 <= number(beta) < 1 for beta in betas):
        raise UserError(f"betas={betas!r}{where} must be two numbers in [0, 1)")
    for name in _OTHER_METHODS:
        if group.get(name):
            raise UserError(f"{name}={group[name]!r}{where} is not supported: leave it out")


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for the first param group that cannot train."""
    for index, group in enumerate(groups):
        check_group(group, f" of param group {index}" if len(groups) > 1 else "")


def hypers_of(groups: Sequence[Mapping[str, Any]]) -> list[Hyper]:
    """AdamW's numbers of each param group; UserError if a scheduler or hand set one that cannot train."""
    check_groups(groups)
    numbers = [(g["lr"], g["betas"][0], g["betas"][1], g["eps"], g["weight_decay"]) for g in groups]
    return [Hyper(*map(float, found)) for found in numbers]


def check_still_frozen(frozen: Sequence[tuple[str, Tensor]]) -> None:
    """Raise UserError for a parameter that trains now and has no state, since it did not then."""
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise UserError(
                f"{name} was frozen when OffloadedAdamW was built and is not now: "
                "unfreeze parameters before building the optimizer"
            )


def check_parameters(named: Mapping[str, Tensor]) -> None:
    """Raise UserError unless the parameters can be trained, each by itself and all together."""
    for name, parameter in named.items():
        check_parameter(name, parameter)
    device_of(named)
    check_separate(named)


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise UserError for a parameter that cannot be cut into flat buckets."""
    if is_lazy(parameter):
        raise UserError(f"{name} has no shape yet: run the model once before building the optimizer")
    if parameter.dtype not in NAMES:
        raise UserError(f"{name} is {parameter.dtype}: OffloadedAdamW trains bf16, fp16 and fp32 parameters")
    if parameter.is_meta or (parameter.numel() and not parameter.data_ptr()):
        raise UserError(
            f"{name} holds no values of its own ({type(parameter.data).__name__} on {parameter.device}): "
            "load the model before building the optimizer"
        )
    if parameter.is_inference():
        raise UserError(f"{name} was made under torch.inference_mode(), so it cannot train: make it outside")
    if not parameter.is_contiguous():
        raise UserError(f"{name} is not contiguous in memory: make it so with .contiguous() before training")


def check_names(names: Sequence[str]) -> None:
    """Raise UserError if two parameters have one name."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise UserError(f"{count} parameters are called {name!r}: give each a name of its own")


def check_separate(named: Mapping[str, Tensor]) -> None:
    """Raise UserError if parameters share memory: each would be trained as if it were alone in it."""
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in named.items() if p.numel())
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise UserError(f"{one} and {other} share memory: tie them to one parameter and pass it once")


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
    """The parameter's gradient, dense or of rows; UserError for other kinds and dtypes, or if it is gone."""
    gradient = parameter.grad
    if gradient is None:
        raise UserError(
            f"the gradient of {name} was gone when OffloadedAdamW(release_gradients=True) came for it: "
            "another optimizer or hook on the same parameters took it; close() or remove that one"
        )
    if gradient.layout is not torch.strided and not _of_rows(gradient):
        layout = str(gradient.layout).removeprefix("torch.")
        raise UserError(f"{name} has a gradient of layout {layout}: make it dense, or of rows (sparse_coo)")
    if gradient.dtype != parameter.dtype:
        raise UserError(
            f"{name} is {parameter.dtype} and its gradient {gradient.dtype}, which would be rounded: "
            "leave grad_dtype as it is"
        )
    return gradient


def _of_rows(gradient: Tensor) -> bool:
    """Whether a gradient is sparse in its rows alone, such as that of an embedding with sparse=True."""
    return gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1 and gradient.dim() == 2


def number(value: Any) -> float:
    """A number or a tensor of one as a float; NaN for everything else, texts and truth values too."""
    if isinstance(value, bool | str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
