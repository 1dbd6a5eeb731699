"""Attention that keeps the documents of a packed row apart, as one function in transformers' registry.

The model is called with ``documents``, the (row, start, stop) of every document, and hands it to every
attention layer. Each document is one call of causal scaled_dot_product_attention on views of the row's
queries, keys and values: no mask over the row exists, and no work is done across documents. Where a row is
more than one document, backward keeps one [B, L, H, D] more a layer than otherwise: the joined output.

Shapes: B rows, L positions of a row, N positions of a document, H query heads, K key and value heads,
G = H / K query heads of a group, D head size.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from headrace.errors import UserError
from headrace.memory.shapes import round_length
from headrace.models.documents import Documents, noted_documents, watch_documents

NAME = "headrace"
"""The key in transformers' attention registry."""

_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_PACKABLE = {"full_attention", "sliding_attention", "moe", "mlp", "sparse", "dense"}
_WITHOUT_INFLUENCE = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "logits_to_keep", "return_dict"),
}


def register() -> None:
    """Make ``attn_implementation="headrace"`` known to transformers; a second call changes nothing."""
    AttentionInterface.register(NAME, document_attention)
    AttentionMaskInterface.register(NAME, _refuse_mask)


def attach(model: PreTrainedModel) -> None:
    """Let every attention layer of ``model`` use :func:`document_attention`.

    Raises UserError for an architecture that computes its attention outside transformers' registry: it would
    not see the documents.
    """
    register()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would warn of is refused below
    try:
        model.set_attn_implementation(NAME)
    finally:
        logging.set_verbosity(verbosity)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise UserError(
            f"{type(model).__name__} computes its attention outside transformers' AttentionInterface, so "
            "documents could not be kept apart; choose a model of another architecture"
        )
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            watch_documents(module)


def check_packable(config: PreTrainedConfig, context: int | None = None) -> None:
    """Raise UserError if a layer would let the documents of a row know of one another.

    Some layers mix positions by other means than attention (Mamba, convolutions). And with ``longrope`` all
    positions of a call rotate by the frequencies of its longest document, if ``context``, the tokens of a
    row, leaves room for one beyond the length that the model was first trained for.
    """
    config = config.get_text_config()
    others = sorted({*(getattr(config, "layer_types", None) or ())} - _PACKABLE)
    if not others and not getattr(config, "num_attention_heads", None):
        others = [f"{config.model_type} blocks"]
    if others:
        raise UserError(
            f"data.packing=true needs layers that are all attention, but {config.model_type} has "
            f"{', '.join(others)}, which would mix the documents of a row; set data.packing=false"
        )
    short = _first_trained_length(config)
    if context is not None and short is not None and context > short:
        raise UserError(
            f"data.packing=true with data.context={context} would let a document of more than {short} tokens "
            f"change how {config.model_type} rotates all others of its micro-batch (longrope); set "
            f"data.context={short}, or data.packing=false and train.micro_batch=1"
        )


def _first_trained_length(config: PreTrainedConfig) -> int | None:
    """Tokens up to which a model with ``longrope`` uses its short frequencies; None for any other."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document; within each whole row when ``documents`` is None.

    Called by transformers with query [B, H, L, D], key and value [B, K, L, D]; gives [B, L, H, D], zero at
    positions in no document. ``sliding_window`` limits a position to that many latest ones, itself included;
    ``softcap`` bounds the scores by tanh (Gemma 2, arXiv:2408.00118, section 2). Raises UserError for a
    key-value cache, a mask, and whatever else an architecture asks of its attention.
    """
    _check_call(module, query, key, attention_mask, is_causal)
    documents = noted_documents(module) if documents is None else documents
    rows, length = query.shape[0], query.shape[2]
    whole_rows = tuple((row, 0, length) for row in range(rows))
    documents = whole_rows if documents is None else tuple(documents)
    longest = max((stop - start for _, start, stop in documents), default=0)
    window = _window(module, kwargs, longest)
    _check_arguments(module, kwargs)

    settings: dict[str, Any] = {"mask": None, "dropout": dropout, "scaling": scaling}
    if window < longest or softcap is not None:
        settings["mask"] = _band_mask(_computed_length(length, query), window, query.dtype, query.device)
    attend = (
        partial(_fused, **settings) if softcap is None else partial(_softcapped, softcap=softcap, **settings)
    )
    if documents == whole_rows:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    return _document_by_document(query, key, value, documents, attend), None


def _document_by_document(
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    documents: Documents,
    attend: _Attend,
) -> torch.Tensor:
    rows, heads, length, _ = query_BHLD.shape
    outputs = []
    for row in range(rows):
        spans = list(_spans([(start, stop) for at, start, stop in documents if at == row], length))
        lengths = [span for span, _ in spans]
        # Backward of split is one concatenation; of slices it would be a full-size addition per document.
        parts = [x[row].split(lengths, dim=1) for x in (query_BHLD, key_BKLD, value_BKLD)]
        for (span, is_document), q, k, v in zip(spans, *parts, strict=True):
            if is_document:
                padded = [_padded(x, _computed_length(span, x)) for x in (q, k, v)]
                outputs.append(attend(*padded)[0, :, :span].transpose(0, 1))
            else:
                outputs.append(v.new_zeros(span, heads, v.shape[-1]))
    return torch.cat(outputs).view(rows, length, heads, -1)


def _computed_length(span: int, like: torch.Tensor) -> int:
    """The length at which a document of ``span`` tokens is computed; later positions do not reach back."""
    return round_length(span) if like.device.type == "cpu" and like.element_size() < 4 else span


def _padded(x_HND: torch.Tensor, length: int) -> torch.Tensor:
    return pad(x_HND, (0, 0, 0, length - x_HND.shape[1]))[None] if length > x_HND.shape[1] else x_HND[None]


def _spans(documents: list[tuple[int, int]], length: int) -> Iterator[tuple[int, bool]]:
    """Lengths that cover a row in order, each with whether it is a document."""
    position = 0
    for start, stop in documents:
        assert position <= start < stop <= length, f"document {start}:{stop} in a row of {length}"
        if start > position:
            yield start - position, False
        yield stop - start, True
        position = stop
    if position < length:
        yield length - position, False


def _fused(
    query_BHND: torch.Tensor,
    key_BKND: torch.Tensor,
    value_BKND: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    length = query_BHND.shape[2]
    grouped = query_BHND.shape[1] != key_BKND.shape[1]
    if grouped and mask is not None and query_BHND.is_cuda:
        # No fused CUDA kernel takes both; the one that takes neither would hold [H, N, N] scores.
        groups = query_BHND.shape[1] // key_BKND.shape[1]
        key_BKND, value_BKND = (x.repeat_interleave(groups, dim=1) for x in (key_BKND, value_BKND))
    return scaled_dot_product_attention(
        query_BHND,
        key_BKND,
        value_BKND,
        attn_mask=None if mask is None else mask[:length, :length],
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query_BHND.shape[1] != key_BKND.shape[1],
    )


def _softcapped(
    query_BHND: torch.Tensor,
    key_BKND: torch.Tensor,
    value_BKND: torch.Tensor,
    mask: torch.Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Written out, since no fused kernel of torch bounds scores; holds [H, N, N] scores."""
    rows, heads, length, size = query_BHND.shape
    groups = key_BKND.shape[1]
    # The query heads of a group side by side: keys and values need no repetition.
    query_BKgD = query_BHND.reshape(rows, groups, heads // groups * length, size)
    scores = query_BKgD @ key_BKND.mT * (size**-0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, heads, length, length) + mask[:length, :length]
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = drop(weights.to(query_BHND.dtype), dropout)
    weights_BKgN = weights.view(rows, groups, heads // groups * length, length)
    return (weights_BKgN @ value_BKND).view(rows, heads, length, -1)


@lru_cache(maxsize=2)  # the layers of a model share one, so that backward keeps one
def _band_mask(length: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[length, length], zero where a position sees another, else -inf; its corner serves shorter ones."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _window(module: torch.nn.Module, kwargs: dict[str, Any], longest: int) -> int:
    """How many positions one sees, taken out of ``kwargs``; the longest document where there is no limit."""
    if "sliding_window" in kwargs:
        window = kwargs.pop("sliding_window")
        return longest if window is None else min(window, longest)
    for limit in ("sliding_window", "attention_chunk_size"):
        reach = getattr(getattr(module, "config", None), limit, None)
        if reach and reach < longest:  # some configurations write 0 for none
            raise UserError(
                f"{type(module).__name__} does not tell its attention function about {limit}={reach}, so "
                f"{longest} tokens of a document would be attended to wrongly; set data.context={reach}"
            )
    return longest


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
) -> None:
    if attention_mask is not None:
        _refuse_mask(attention_mask)
    if query.shape[2] != key.shape[2]:
        raise UserError(
            "attention 'headrace' is for training and has no key-value cache; call the model with "
            "use_cache=False, or model.set_attn_implementation('sdpa') before generating"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UserError(
            f"{type(module).__name__} attends in both directions; only causal models are supported"
        )


def _check_arguments(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    asked = {name for name, value in kwargs.items() if value is not None and value is not False}
    if unknown := sorted(asked - _WITHOUT_INFLUENCE):
        raise UserError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which is not supported; "
            "choose a model of another architecture"
        )


def _refuse_mask(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Stands in transformers' registry of masks too, where a mask of ones or of padding would be dropped."""
    if attention_mask is not None:
        raise UserError(
            "attention 'headrace' takes documents=... instead of attention_mask; leave the mask out, or call "
            "model.set_attn_implementation('sdpa')"
        )
