"""Low-rank adapters beside the frozen matrices of a model (LoRA, Hu et al. 2021), put in place by PEFT.

The model stays the transformers model that it was: its linear layers are replaced by PEFT's, which hold them.
"""

import hashlib
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headrace.errors import UserError
from headrace.hub import hub_name
from headrace.models.config import LoraConfig
from headrace.models.published import Pieces, pieces_of
from headrace.models.source import find_source
from headrace.planner.lora import choose

NAME = "default"
"""PEFT's name of a model's first adapter; it is a part of its parameters' names."""

_SAMPLED = 4096  # elements of a parameter that the fingerprint reads, about


def require_peft() -> ModuleType:
    """The peft package; raises UserError with the fix where it is missing."""
    try:
        import peft
    except ImportError as error:
        raise UserError("model.lora needs the peft package: pip install headrace[lora]") from error
    return peft


def check_trainable(path: str) -> None:
    """Raise UserError unless a model path has weights that an adapter can be trained beside, and PEFT."""
    require_peft()
    if not find_source(path).has_weights:
        raise UserError(
            f"model.lora adapts trained weights, and model.path={path} is a configuration without any: give "
            "a model with weights, or leave model.lora out to train one from scratch"
        )


def add_adapters(model: PreTrainedModel, lora: LoraConfig, base: str, seed: int = 0) -> None:
    """Freeze a model and put adapters, in its dtype, beside the linear layers that ``lora`` names.

    A is drawn in fp32 as PEFT does under ``seed`` and cast; B is zero, so the model computes what it did.

    Args:
        model: as loaded.
        lora: rank, alpha and targets.
        base: the model's path, or its name on the hub, which the saved adapter will name.
        seed: of A.

    Raises:
        UserError: peft is missing, or a target is no linear layer.
    """
    peft = require_peft()
    layers = linear_layers(model)
    targets = choose(lora.targets, list(layers))
    hub = hub_name(base, "model")
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        fan_in_fan_out=isinstance(layers[targets[0]], Conv1D),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base if hub is None else hub.id,
        revision=None if hub is None else hub.revision,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, NAME)
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set, in another order every time
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(targets), (len(trained), len(targets))


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of a model by dotted name, the output matrix apart, in the model's order.

    A mixture of experts has those of its attention: PEFT takes names in an mlp for the experts'.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    mixture = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts"))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
        if not (mixture and ".mlp." in name)
    }


@torch.no_grad()
def merge(
    model: PreTrainedModel, lora: LoraConfig, read: Callable[[str, tuple[int, ...]], torch.Tensor]
) -> None:
    """Add adapters to the weights of a model that has none: W + B A alpha / rank, in fp32, rounded once.

    Args:
        model: the base, in any dtype.
        lora: what the adapters were trained with.
        read: fp32 values of an adapter's parameter, by its name in the trained model and its shape.
    """
    layers = linear_layers(model)
    for name in choose(lora.targets, list(layers)):
        weight = layers[name].weight
        assert isinstance(weight, nn.Parameter)
        swapped = isinstance(layers[name], Conv1D)
        outputs, inputs = weight.T.shape if swapped else weight.shape
        a_RI = read(f"{name}.lora_A.{NAME}.weight", (lora.rank, inputs))
        b_OR = read(f"{name}.lora_B.{NAME}.weight", (outputs, lora.rank))
        change_OI = (b_OR @ a_RI) * (lora.alpha / lora.rank)
        weight.copy_(weight.float() + (change_OI.T if swapped else change_OI).to(weight.device))


def fingerprint(model: nn.Module, elsewhere: Pieces | None = None) -> str:
    """A digest of a model's own parameters, whether it has adapters or not, and whatever its dtype.

    Adapters belong to one base: beside another they mean nothing. The names, the shapes, and some thousand
    elements of each parameter, in bf16, tell two models apart without reading all of a large one.

    Args:
        model: with or without adapters.
        elsewhere: gives those of its parameters that it does not hold itself.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if f".{NAME}." in name:
            continue
        step, position, sampled = max(1, parameter.numel() // _SAMPLED), 0, []
        for piece in pieces_of(name, parameter, elsewhere):
            sampled.append(piece[-position % step :: step].to("cpu", torch.bfloat16).clone())
            position += piece.numel()
        sample = torch.cat(sampled)
        digest.update(f"{name.replace('.base_layer.', '.')} {tuple(parameter.shape)}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().data)
    return digest.hexdigest()
