"""What a model is made of, from its config.json alone: sizes, and every parameter by name and shape."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from headrace.errors import UserError
from headrace.planner.families import FAMILIES, Family
from headrace.planner.lora import Adapters, Targets, choose, linear_layers
from headrace.planner.parameters import ParameterShape
from headrace.schedule.layout import Layout, Parameter, cut, padded

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 0, "gelu_pytorch_tanh": 0, "gelu_new": 3}
"""The functions between the matrices of a layer, and how many tensors autograd keeps of each besides input
and result: none of a single kernel; three of GPT-2's, which transformers writes out."""

DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"),
    *("residual_dropout", "embedding_dropout", "router_jitter_noise"),
)
"""Noise in training: with it other kernels run, which save more."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Attributes:
        count: how many there are.
        chosen: how many see a token.
        width: between the matrices of one.
        normalised: whether the weights of the chosen sum to one.
        balanced: whether the loss has a term that balances them.
    """

    count: int
    chosen: int
    width: int
    normalised: bool
    balanced: bool = False


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
        activation: the function between the matrices of a layer.
        positions: rows of the embedding of positions, 0 without one.
        parallel: whether attention and mlp of a layer work side by side.
        biased: which of ``qkv``, ``out``, ``mlp``, ``norm``, ``head`` have biases.
        sparse: the layers that hold a mixture of experts.
        experts: its sizes, None for a dense model.
        kinds: per layer, ``full_attention`` or ``sliding_attention``.
        window: tokens that a sliding layer sees, None for all.
        softcap: the cap of the attention logits, None for none.
        logit_cap: the cap of the output logits, None for none.
        adapters: what is trained beside the frozen model; None where the model itself is.
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
    activation: str = "silu"
    positions: int = 0
    parallel: bool = False
    biased: frozenset[str] = frozenset()
    sparse: frozenset[int] = frozenset()
    experts: Experts | None = None
    kinds: tuple[str, ...] = ()
    window: int | None = None
    softcap: float | None = None
    logit_cap: float | None = None
    adapters: Adapters | None = None

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
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner, experts = self.intermediate, self.experts
        sizes = {"V": self.vocab, "P": self.positions, "H": self.hidden, "Q": queries, "K": keys}
        sizes |= {"F": queries + 2 * keys, "D": self.head_dim, "I": inner, "G": 2 * inner}
        if experts is not None:
            sizes |= {"E": experts.count, "J": experts.width, "U": 2 * experts.width}
        named = self.family.table.named(
            sizes, self.layers, sparse=self.sparse, biased=self.biased, tied=self.tied, parallel=self.parallel
        )
        return tuple(named)

    def with_adapters(self, rank: int, targets: Targets) -> "ModelShape":
        """The same model, frozen, with adapters beside its linear layers.

        Raises UserError for a target that is none of them.
        """
        modules = choose(targets, linear_layers(self.parameters, self.family.table))
        return replace(self, adapters=Adapters(rank, modules))

    @cached_property
    def trained(self) -> tuple[ParameterShape, ...]:
        """What is trained: the adapters where there are any, else every parameter."""
        if self.adapters is None:
            return self.parameters
        return tuple(self.adapters.parameters(self.parameters, self.family.table))

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, adapters apart."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def trained_numel(self) -> int:
        """Elements of what is trained."""
        return sum(parameter.numel for parameter in self.trained)

    @cached_property
    def aligned_numel(self) -> int:
        """Elements of the optimizer's buckets, in which every parameter starts at a multiple of 16."""
        return sum(padded(parameter.numel) for parameter in self.trained)

    def layout(self, capacity: int) -> Layout:
        """The optimizer's buckets."""
        return cut(self.grouped, capacity)

    @cached_property
    def grouped(self) -> list[Parameter]:
        """What is trained in its param groups: matrices, which decay, are one, all else is another."""
        grouped = sorted(self.trained, key=lambda parameter: len(parameter.shape) < 2)
        return [Parameter(p.name, p.numel, int(len(p.shape) < 2), "") for p in grouped]

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max(parameter.numel for parameter in self.trained)

    @property
    def rotary_kinds(self) -> int:
        """How many sets of rotary frequencies, and of cosines and sines, there are."""
        if not self.rotary:
            return 0
        return len(set(self.kinds)) if self.family.rotary_per_kind else 1

    def buffer_bytes(self, element: int) -> int:
        """Bytes of the module's buffers: two fp32 copies of the rotary frequencies, and Gemma's scale."""
        return self.rotary_kinds * 2 * -(-self.rotary // 2) * 4 + self.family.scaled_embedding * element


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
        heads, layers = self.size("num_attention_heads"), self.size("num_hidden_layers")
        hidden, head_dim = self.size("hidden_size"), self.head_dim(heads)
        self.check_unplanned()
        self.check_epsilons()
        return ModelShape(
            family=self.family,
            model_type=self.name,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=self.kv_heads(heads),
            head_dim=head_dim,
            intermediate=self.size("intermediate_size", self.family.widening * hidden or None),
            vocab=self.size("vocab_size"),
            tied=bool(self.value("tie_word_embeddings", False)),
            rotary=self.rotary(head_dim),
            activation=self.activation(),
            positions=self.size("max_position_embeddings") if self.family.learned_positions else 0,
            parallel=self.decides(self.family.parallel),
            biased=frozenset(name for name, rule in self.family.biases.items() if self.decides(rule)),
            sparse=frozenset(self.sparse(layers)),
            experts=self.experts(),
            kinds=self.kinds(layers),
            window=self.window(),
            softcap=self.value(self.family.softcap) if self.family.softcap else None,
            logit_cap=self.value("final_logit_softcapping"),
        )

    def value(self, key: str, default: Any = None) -> Any:
        """The config's value; without one, the family's default, then ``default``."""
        family = self.family
        other, common = family.keys.get(key), None if key in family.ignored else key
        for name in (other, common):
            if name is not None and name in self.config:
                return self.config[name]
        return family.defaults.get(key, default)

    def decides(self, rule: bool | str) -> bool:
        """A rule of the family: itself, or what the config says under its key."""
        return bool(self.value(rule, False)) if isinstance(rule, str) else rule

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
        if self.family.learned_positions:
            return 0
        if self.family.rotary is None:
            return head_dim
        ropes = [self.config, self.config.get("rope_parameters") or {}, self.config.get("rope_scaling") or {}]
        keys = ("partial_rotary_factor", "rotary_pct")
        shares = [rope[key] for rope in ropes for key in keys if rope.get(key) is not None]
        return int(head_dim * (shares[0] if shares else self.family.rotary))

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
        normalised, balanced = (bool(self.value(key)) for key in ("norm_topk_prob", "output_router_logits"))
        return Experts(count, chosen, self.size(width), normalised, balanced)

    def sparse(self, layers: int) -> Iterator[int]:
        if self.family.experts is None:
            return
        dense = set(self.value("mlp_only_layers") or ()) if self.family.mixed_layers else set()
        every = self.size("decoder_sparse_step", 1) if self.family.mixed_layers else 1
        yield from (index for index in range(layers) if index not in dense and not (index + 1) % every)

    def kinds(self, layers: int) -> tuple[str, ...]:
        listed = self.value("layer_types")
        if listed is None:
            return tuple(
                "sliding_attention" if self.slides(index) else "full_attention" for index in range(layers)
            )
        if len(listed) != layers:
            raise UserError(
                f"layer_types in config.json lists {len(listed)} layers, num_hidden_layers says {layers}: "
                "correct one of the two"
            )
        return tuple(listed)

    def slides(self, index: int) -> bool:
        """Whether a layer attends in a window, where the config does not list the kinds of layers."""
        every = self.value("sliding_window_pattern", self.family.window_pattern)
        if every:
            return bool((index + 1) % every)
        return self.window() is not None and index >= self.value("max_window_layers", 0)

    def window(self) -> int | None:
        if self.value("use_sliding_window", True) and self.value("sliding_window") is not None:
            return self.size("sliding_window")
        return None

    def activation(self) -> str:
        key = "hidden_act" if self.value("hidden_activation") is None else "hidden_activation"
        name = self.value(key, "silu")
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UserError(
                f"{self.family.keys.get(key, key)} {name!r} in config.json cannot be planned; these can: "
                f"{', '.join(ACTIVATIONS)}"
            )
        return str(name)

    def check_unplanned(self) -> None:
        for key in DROPOUTS:
            if self.value(key):
                place = "in config.json" if key in self.config else "by default"
                raise UserError(
                    f"{key} {self.value(key)} {place} cannot be planned: set it to 0 in config.json"
                )
        for key in self.family.unplanned:
            if self.value(key):
                raise UserError(
                    f"{key} in config.json of the {self.name} model changes its layers in a way that cannot "
                    "be planned: choose a model without it"
                )

    def check_epsilons(self) -> None:
        """What norms add under their root: with less than nothing the first step would not be finite."""
        for key, found in self.config.items():
            number = isinstance(found, int | float) and not isinstance(found, bool)
            if key.endswith(("norm_eps", "norm_epsilon")) and not (number and 0 < found < 1):
                raise UserError(f"{key} in config.json must be a number between 0 and 1, not {found!r}")
