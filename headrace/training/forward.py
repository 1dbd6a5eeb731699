"""From a micro-batch to its loss: the decoder of a Hugging Face model, then the chunked loss over its head.

Shapes: B rows, L positions, N positions of the probe, D width, V vocabulary.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.data.batch import MicroBatch
from headrace.errors import UserError
from headrace.training.loss import Head, chunked_cross_entropy, token_losses
from headrace.training.row_loss import Pieces, row_cross_entropy

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon H1
_DIVISORS = ("logits_scaling",)  # Granite
_SOFTCAP = "final_logit_softcapping"  # Gemma 2
_BALANCED = "output_router_logits"  # Mixtral
_PROBE_TOKENS = 4
_PROBE_PEAK = 100.0  # the highest logit of the probe: far above every known cap, so that a missed cap shows


def forward_loss(
    model: PreTrainedModel,
    batch: MicroBatch,
    scale: float,
    chunk: int,
    around_loss: AbstractContextManager | None = None,
    rows: Pieces | None = None,
) -> Tensor:
    """The micro-batch's share of the step's loss: its summed cross-entropy times ``scale``.

    A mixture of experts whose config sets ``output_router_logits`` adds its balancing loss (Fedus et al.
    2021, section 2.2), computed by transformers over the micro-batch's documents, times
    ``router_aux_loss_coef`` and the micro-batch's share of the step's trained tokens.

    Args:
        model: a causal language model that passed :func:`check_head`.
        batch: on any device; it is copied to the model's.
        scale: one over the trained tokens of the whole optimizer step.
        chunk: tokens whose logits exist at a time.
        around_loss: entered for the loss alone, to measure it.
        rows: gives the output embedding's rows where they come in pieces.

    Returns:
        A scalar whose backward gives the gradients of all trained parameters; see
        :func:`~headrace.training.loss.chunked_cross_entropy`.
    """
    output = _decode(model, batch)
    labels_BL = batch.labels_BL.to(output[0].device)
    balance = None
    if _is_balanced(model):
        mask_BL = None if _is_full(batch) else _document_mask(batch)
        balance = _balancing_loss(model, output.router_logits, mask_BL) * batch.valid_tokens * scale
    with around_loss or nullcontext():
        head = output_head(model)
        if rows is None:
            loss = chunked_cross_entropy(output[0], head, labels_BL, scale=scale, chunk=chunk)
        else:
            loss = row_cross_entropy(output[0], head, rows, labels_BL, scale=scale, chunk=chunk)
    return loss if balance is None else loss + balance


@torch.no_grad()
def forward_token_losses(model: PreTrainedModel, batch: MicroBatch, chunk: int) -> Tensor:
    """The cross-entropy [B, L] of every trained token, 0 elsewhere; for evaluation, without gradients."""
    hidden_BLD = _decode(model, batch)[0]
    labels_BL = batch.labels_BL.to(hidden_BLD.device)
    return token_losses(hidden_BLD, output_head(model), labels_BL, chunk=chunk)


def output_head(model: PreTrainedModel) -> Head:
    """The model's last linear layer, with the scaling and the soft cap that its config asks for.

    Raises UserError if the output layer is not a plain ``nn.Linear``.
    """
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise UserError(
            f"{type(model).__name__} ends in {type(layer).__name__}, but the loss needs a plain linear layer "
            "from hidden states to logits; choose another model"
        )
    config = model.config.get_text_config()
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    return Head(layer.weight, layer.bias, scale, getattr(config, _SOFTCAP, None))


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Run the model on a few tokens and compare its own logits with those that the loss will compute.

    Hidden states are made large on their way to the head, so that a soft cap shows. In training mode a model
    with dropout draws random numbers: call before seeding.

    Raises UserError if they differ (a head with further layers, a scaling that is not known here), if they
    are not finite, or if a balancing loss is asked for that the model does not compute like Mixtral.
    """
    head, decoder = output_head(model), model.get_decoder()
    seen: list[Tensor] = []
    routed: list[Any] = []

    def enlarge(module: nn.Module, args: Any, output: Any) -> Any:
        peak = _logits(replace(head, softcap=None), output[0]).abs().max()
        if not peak.isfinite():
            raise _not_finite(model)
        routed.append(getattr(output, "router_logits", None))
        seen.append(output[0] * (_PROBE_PEAK / peak) if peak else output[0])
        output.last_hidden_state = seen[-1]
        return output

    handle = decoder.register_forward_hook(enlarge)
    try:
        vocabulary = head.weight_VD.shape[0]
        input_ids = torch.arange(_PROBE_TOKENS, device=head.weight_VD.device)[None] % vocabulary
        output = model(input_ids=input_ids, use_cache=False)
    finally:
        handle.remove()
    if not seen or not _agree(output.logits, _logits(head, seen[-1])):
        raise UserError(
            f"{type(model).__name__} does more between hidden states and logits than one linear layer, "
            "a scaling and a soft cap, so its loss cannot be computed in chunks; choose another model"
        )
    if _is_balanced(model):
        _check_balancing_loss(model, routed[-1], getattr(output, "aux_loss", None))


def _decode(model: PreTrainedModel, batch: MicroBatch) -> Any:
    """The decoder's output: hidden states [B, L, D] first, and the router's logits if its loss is wanted."""
    device = model.get_input_embeddings().weight.device
    return model.get_decoder()(
        input_ids=batch.input_ids_BL.to(device),
        position_ids=batch.position_ids_BL.to(device),
        use_cache=False,  # with a cache, and with a mask of ones, transformers attends across documents
        documents=batch.documents,
        **({_BALANCED: True} if _is_balanced(model) else {}),
    )


def _is_balanced(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config.get_text_config(), _BALANCED, False))


def _balancing_loss(model: PreTrainedModel, router_logits: Any, mask_BL: Tensor | None) -> Tensor:
    """Weighted as the model weighs it; ``mask_BL`` leaves padding out."""
    unweighted = sys.modules[type(model.get_decoder()).__module__].load_balancing_loss_func
    experts, chosen = model.num_experts, model.num_experts_per_tok
    return unweighted(router_logits, experts, chosen, mask_BL) * model.router_aux_loss_coef


def _check_balancing_loss(model: PreTrainedModel, router_logits: Any, theirs: Tensor | None) -> None:
    try:
        ours = _balancing_loss(model, router_logits, None)
    except AttributeError:  # the model lacks one of its parts
        ours = None
    if ours is None or theirs is None or not torch.equal(ours, theirs * model.router_aux_loss_coef):
        raise UserError(
            f"{_BALANCED}=true in config.json asks for a loss that balances experts, which "
            f"{type(model).__name__} lacks or does not compute like Mixtral; set it to false there"
        )


def _is_full(batch: MicroBatch) -> bool:
    return sum(stop - start for _, start, stop in batch.documents) == batch.input_ids_BL.numel()


def _document_mask(batch: MicroBatch) -> Tensor:
    """[B, L], 1 in documents and 0 in padding, as transformers' attention mask."""
    mask_BL = torch.zeros_like(batch.input_ids_BL)
    for row, start, stop in batch.documents:
        mask_BL[row, start:stop] = 1
    return mask_BL


def _logits(head: Head, hidden_BND: Tensor) -> Tensor:
    logits_BNV = nn.functional.linear(hidden_BND, head.weight_VD, head.bias_V).float() * head.scale
    return logits_BNV if head.softcap is None else head.softcap * torch.tanh(logits_BNV / head.softcap)


def _agree(theirs: Tensor, ours: Tensor) -> bool:
    # Four roundings (product, scaling, division, tanh) of the model's dtype lie between the two.
    tolerance = max(4 * torch.finfo(theirs.dtype).eps, 1e-4) * ours.abs().max()
    return theirs.shape == ours.shape and bool((theirs.float() - ours).abs().max() <= tolerance)


def _not_finite(model: PreTrainedModel) -> UserError:
    name = next((n for n, p in model.named_parameters() if not p.isfinite().all()), None)
    reason = f"{name} holds NaN or infinity: fetch or save the model again"
    if name is None:
        reason = (
            f"its activations overflow in {str(model.dtype).removeprefix('torch.')}: choose another dtype"
        )
    return UserError(f"{type(model).__name__} gives logits that are not finite, because {reason}")
