"""Random weights drawn part by part, bit for bit those of the whole model drawn at once.

transformers builds a model with torch's own random numbers in it and then walks over its modules with its
own initialisation. Here it does both without memory, only that the numbers are drawn all the same, so that
others follow; a part of the model has memory from its first visit until it is complete.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from headrace.errors import UserError
from headrace.memory.weights import WeightStore
from headrace.models.homes import Filling, streamed_units

Put = Callable[[str, torch.Tensor], None]
_VISIT = "_initialize_weights"  # what transformers calls for every module in turn


def draw_parameters(
    model: PreTrainedModel,
    store: WeightStore,
    build: Callable[[], PreTrainedModel],
    seed: int,
    device: torch.device,
) -> None:
    """Initialise a model as transformers does under ``seed``, drawn in fp32, a unit at a time.

    Args:
        model: with parameters on the meta device; its streamed ones are placeholders afterwards.
        store: the home of the streamed ones.
        build: makes the same model in fp32.
        seed: of the CPU's generator, which is left as it was.
        device: of all parameters.

    Raises:
        UserError: this version of transformers initialises in another way.
    """
    if not hasattr(PreTrainedModel, _VISIT):
        raise UserError(
            "this version of transformers cannot draw random weights part by part: start from a model "
            "directory, or set memory.weights=device"
        )
    wanted = {name: parameter.dtype for name, parameter in model.named_parameters()}
    with Filling(store, device) as filling:
        streamed = set(filling.order)

        def put(name: str, value: torch.Tensor) -> None:
            if name in streamed:
                filling.fill(name, value)
                value = filling.placeholder(torch.empty(value.shape, dtype=wanted[name], device="meta"))
            if name in wanted:  # not a second name of another one
                module, _, leaf = name.rpartition(".")
                value = value.to(device, wanted[name])
                # Not by assignment, which has no memory while a model is built without.
                model.get_submodule(module)._parameters[leaf] = nn.Parameter(value)

        whole = [module for modules in streamed_units(model).values() for module in modules]
        names = {id(module): name for name, module in model.named_modules()}
        _draw(build, {names[id(module)] for module in whole}, put, seed)


def _draw(build: Callable[[], PreTrainedModel], units: set[str], put: Put, seed: int) -> None:
    """Build a model and hand its parameters on, those of a unit together when it is complete."""
    order = iter(_order(build))

    def visit(initialise: Callable[[], None], module: nn.Module) -> None:
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(torch.empty(parameter.shape))
        initialise()
        name = next(order)
        if name in units:
            _hand_on(name, module, put)
        elif not any(name.startswith(f"{unit}.") for unit in units):
            _hand_on(name, module, put, recurse=False)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _visited_by(visit), init_empty_weights(include_buffers=False), _Drawn():
            build()


def _hand_on(prefix: str, module: nn.Module, put: Put, recurse: bool = True) -> None:
    for leaf, parameter in list(module.named_parameters(recurse=recurse)):
        put(f"{prefix}.{leaf}" if prefix else leaf, parameter.detach())
        owner, _, name = leaf.rpartition(".")
        module.get_submodule(owner)._parameters[name] = nn.Parameter(parameter.to("meta"))


def _order(build: Callable[[], PreTrainedModel]) -> list[str]:
    """Names of a model's modules in the order in which they are initialised."""
    visited: list[nn.Module] = []
    with _visited_by(lambda _, module: visited.append(module)), init_empty_weights(include_buffers=False):
        model = build()
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in visited]


@contextmanager
def _visited_by(visit: Callable[[Callable[[], None], nn.Module], None]) -> Iterator[None]:
    """While models are built, call ``visit(initialise, module)`` once for every module."""
    original = getattr(PreTrainedModel, _VISIT)

    def visited(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not getattr(module, "_is_hf_initialized", False):
            visit(lambda: original(self, module, *args, **kwargs), module)
            module._is_hf_initialized = True  # type: ignore[assignment]

    setattr(PreTrainedModel, _VISIT, visited)
    try:
        yield
    finally:
        setattr(PreTrainedModel, _VISIT, original)


class _Drawn(TorchDispatchMode):
    """Lets random numbers for tensors without memory be drawn all the same, and forgotten."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _RANDOM and args[0].is_meta:
            func(torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:], **kwargs)
            return args[0]
        return func(*args, **kwargs)


_RANDOM = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_")
