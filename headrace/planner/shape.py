"""What a model is made of, from its config.json alone: sizes, and every parameter by name and shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from headrace.errors import UserError
from headrace.planner.families import FAMILIES, Family

ALIGN = 16
"""Elements: every parameter starts at a multiple of it in the optimizer's buckets (optim.layout.ALIGN)."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
"""The functions between the matrices of a layer that autograd treats alike: it keeps their input."""

DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
"""Noise in training, which none of these families is published with; with it other kernels save more."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Name and shape of one parameter, as ``model.named_parameters()`` of transformers gives them."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many, how many see a token, the width of one, and how they are weighed."""

    count: int
    chosen: int
    width: int
    normalised: bool


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder and its parameters.

    Attributes:
        family: how layers of this ``model_type`` are built.
        model_type: as in config.json.
        hidden: width of the residual stream.
        layers: number of layers.
        heads, kv_heads, head_dim: attention heads, those of keys and values, width of one.
        intermediate: width between the matrices of a dense layer.
        vocab: rows of the embedding.
        tied: whether the output matrix is the embedding.
        rotary: how many of a head's elements rotate.
        biased: which of ``qkv``, ``out``, ``mlp`` have biases.
        sparse: the layers that hold a mixture of experts.
        experts: its sizes, None for a dense model.
        kinds: per layer, ``full_attention`` or ``sliding_attention``.
        window: tokens that a sliding layer sees, None for all.
        softcap: the cap of the attention logits, None for none.
        logit_cap: the cap of the output logits, None for none.
    """

    family: Family
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    rotary: int
    biased: frozenset[str] = frozenset()
    sparse: frozenset[int] = frozenset()
    experts: Experts | None = None
    kinds: tuple[str, ...] = ()
    window: int | None = None
    softcap: float | None = None
    logit_cap: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a config.json.

        Raises:
            UserError: if the model is of no known family or its config misses or contradicts something.
        """
        return _Reader(config).shape()

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """Every parameter once, in the order of transformers' ``model.named_parameters()``."""
        return tuple(ParameterShape(name, shape) for name, shape in _parameters(self))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def aligned_numel(self) -> int:
        """Elements of the optimizer's buckets: each parameter rounded up to :data:`ALIGN`."""
        return sum(-(-parameter.numel // ALIGN) * ALIGN for parameter in self.parameters)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(parameter.numel for parameter in self.parameters)

    @property
    def rotary_kinds(self) -> int:
        """How many sets of rotary frequencies, and of cosines and sines, there are."""
        return len(set(self.kinds)) if self.family.rotary_per_kind else 1

    def buffer_bytes(self, element: int) -> int:
        """Bytes of the module's buffers: two fp32 copies of the rotary frequencies, and Gemma's scale."""
        return self.rotary_kinds * 2 * (self.rotary // 2) * 4 + self.family.scaled_embedding * element


Named = Iterator[tuple[str, tuple[int, ...]]]


def _parameters(shape: ModelShape) -> Named:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for index in range(shape.layers):
        for name, size in _layer(shape, index):
            yield f"model.layers.{index}.{name}", size
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _layer(shape: ModelShape, index: int) -> Named:
    yield from _attention(shape)
    yield from _experts(shape) if index in shape.sparse else _mlp(shape)
    if shape.family.norms != "after":
        yield "input_layernorm.weight", (shape.hidden,)
    yield "post_attention_layernorm.weight", (shape.hidden,)
    if shape.family.norms == "both":
        yield "pre_feedforward_layernorm.weight", (shape.hidden,)
    if shape.family.norms != "before":
        yield "post_feedforward_layernorm.weight", (shape.hidden,)


def _attention(shape: ModelShape) -> Named:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.family.fused:
        yield from _linear("self_attn.o_proj", queries, shape.hidden)
        yield from _linear("self_attn.qkv_proj", shape.hidden, queries + 2 * keys)
        return
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield from _linear(f"self_attn.{name}_proj", shape.hidden, width, "qkv" in shape.biased)
    yield from _linear("self_attn.o_proj", queries, shape.hidden, "out" in shape.biased)
    if shape.family.head_norm != "none":
        whole = shape.family.head_norm == "all"
        yield "self_attn.q_norm.weight", (queries if whole else shape.head_dim,)
        yield "self_attn.k_norm.weight", (keys if whole else shape.head_dim,)


def _mlp(shape: ModelShape) -> Named:
    if shape.family.fused:
        yield from _linear("mlp.gate_up_proj", shape.hidden, 2 * shape.intermediate)
    else:
        for name in ("gate", "up"):
            yield from _linear(f"mlp.{name}_proj", shape.hidden, shape.intermediate, "mlp" in shape.biased)
    yield from _linear("mlp.down_proj", shape.intermediate, shape.hidden, "mlp" in shape.biased)


def _experts(shape: ModelShape) -> Named:
    assert shape.experts is not None
    count, width = shape.experts.count, shape.experts.width
    router = ("mlp.gate.weight", (count, shape.hidden))
    matrices = [
        ("mlp.experts.gate_up_proj", (count, 2 * width, shape.hidden)),
        ("mlp.experts.down_proj", (count, shape.hidden, width)),
    ]
    yield from [*matrices, router] if shape.family.mixed_layers else [router, *matrices]


def _linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


class _Reader:
    """Reads sizes from a config.json and refuses what contradicts itself."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = config.get("model_type")
        if name not in FAMILIES:
            raise UserError(
                f"model_type {name!r} in config.json cannot be planned; these can: "
                f"{', '.join(sorted(FAMILIES))}"
            )
        if config.get("quantization_config"):
            raise UserError(
                "the model is quantised (quantization_config in config.json), and quantised weights cannot "
                "be trained: take the original checkpoint"
            )
        self.name: str = name
        self.family = FAMILIES[name]
        self.config = config

    def shape(self) -> ModelShape:
        heads = self.size("num_attention_heads")
        head_dim = self.head_dim(heads)
        layers = self.size("num_hidden_layers")
        self.check_activation()
        self.check_dropout()
        return ModelShape(
            family=self.family,
            model_type=self.name,
            hidden=self.size("hidden_size"),
            layers=layers,
            heads=heads,
            kv_heads=self.kv_heads(heads),
            head_dim=head_dim,
            intermediate=self.size("intermediate_size"),
            vocab=self.size("vocab_size"),
            tied=bool(self.value("tie_word_embeddings", False)),
            rotary=self.rotary(head_dim),
            biased=frozenset(self.biased()),
            sparse=frozenset(self.sparse(layers)),
            experts=self.experts(),
            kinds=self.kinds(layers),
            window=self.window(),
            softcap=self.value(self.family.softcap) if self.family.softcap else None,
            logit_cap=self.value("final_logit_softcapping"),
        )

    def value(self, key: str, default: Any = None) -> Any:
        """The config's value; without one, the family's default, then ``default``."""
        found = self.config.get(key)
        return self.family.defaults.get(key, default) if found is None and key not in self.config else found

    def size(self, key: str, default: int | None = None) -> int:
        found = self.value(key)
        found = default if found is None else found
        if found is None:
            raise UserError(f"config.json of the {self.name} model has no {key}: add it")
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise UserError(f"{key} in config.json must be a whole number above zero, not {found!r}")
        return found

    def head_dim(self, heads: int) -> int:
        hidden = self.size("hidden_size")
        if self.value("head_dim") is None and hidden % heads:
            raise UserError(
                f"hidden_size {hidden} in config.json is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim: correct one of the three"
            )
        return self.size("head_dim", hidden // heads)

    def kv_heads(self, heads: int) -> int:
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserError(
                f"num_attention_heads {heads} in config.json is not a multiple of num_key_value_heads "
                f"{kv_heads}: correct one of the two"
            )
        return kv_heads

    def rotary(self, head_dim: int) -> int:
        if not self.family.partial_rotary:
            return head_dim
        ropes = [self.config, self.config.get("rope_parameters") or {}, self.config.get("rope_scaling") or {}]
        share = next((r["partial_rotary_factor"] for r in ropes if "partial_rotary_factor" in r), 1.0)
        return int(head_dim * share)

    def biased(self) -> Iterator[str]:
        for name in ("qkv", "out", "mlp"):
            rule = getattr(self.family, f"{name}_bias")
            if bool(self.value(rule, False)) if isinstance(rule, str) else rule:
                yield name

    def experts(self) -> Experts | None:
        if self.family.experts is None:
            return None
        counts, width = self.family.experts
        key = next((key for key in counts if key in self.config), counts[0])
        count, chosen = self.size(key), self.size("num_experts_per_tok")
        if chosen > count:
            raise UserError(
                f"num_experts_per_tok {chosen} in config.json is more than {key} {count}: "
                "correct one of the two"
            )
        return Experts(count, chosen, self.size(width), bool(self.value("norm_topk_prob", False)))

    def sparse(self, layers: int) -> Iterator[int]:
        if self.family.experts is None:
            return
        dense = set(self.value("mlp_only_layers") or ()) if self.family.mixed_layers else set()
        every = self.size("decoder_sparse_step", 1) if self.family.mixed_layers else 1
        yield from (index for index in range(layers) if index not in dense and not (index + 1) % every)

    def kinds(self, layers: int) -> tuple[str, ...]:
        listed = self.value("layer_types")
        if listed is None:
            every = self.value("sliding_window_pattern", self.family.window_pattern) or 1
            window = self.window() is not None and not self.family.window_pattern
            return tuple(
                "sliding_attention" if window or (index + 1) % every else "full_attention"
                for index in range(layers)
            )
        if len(listed) != layers:
            raise UserError(
                f"layer_types in config.json lists {len(listed)} layers, num_hidden_layers says {layers}: "
                "correct one of the two"
            )
        return tuple(listed)

    def window(self) -> int | None:
        if self.value("use_sliding_window", True) and self.value("sliding_window") is not None:
            return self.size("sliding_window")
        return None

    def check_dropout(self) -> None:
        for key in DROPOUTS:
            if self.config.get(key):
                raise UserError(f"{key} {self.config[key]} in config.json cannot be planned: set it to 0")

    def check_activation(self) -> None:
        keys = [key for key in ("hidden_activation", "hidden_act") if self.config.get(key) is not None]
        name = self.config[keys[0]] if keys else ACTIVATIONS[0]
        if name not in ACTIVATIONS:
            raise UserError(
                f"{keys[0]} {name!r} in config.json cannot be planned; these can: {', '.join(ACTIVATIONS)}"
            )
