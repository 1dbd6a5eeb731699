"""Names and shapes of parameters as tables: how transformers 5.24 registers the modules of its decoders.

A table lists parts in the order of ``model.named_parameters()``. Sizes are letters: V vocabulary, P learned
positions, H hidden, Q all query heads, K all key or value heads, F queries, keys and values in one, D one
head, I between the matrices of a dense layer, G gate and up in one, E experts, J and U as I and G of one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Name and shape of one parameter, as ``model.named_parameters()`` of transformers gives them."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of a table.

    Attributes:
        name: below the layer, or the whole name.
        sizes: one letter a dimension.
        bias: the group that decides whether ``name`` with ``bias`` for ``weight`` follows; empty for never.
        outputs: the bias's letter; the first of ``sizes`` by default.
        sequential: whether it is there only where a layer's blocks follow one another.
    """

    name: str
    sizes: str
    bias: str = ""
    outputs: str = ""
    sequential: bool = False


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Table:
    """The parameters of a decoder.

    Attributes:
        before: what stands before the layers.
        prefix: of every layer's name, before its number.
        layer: a dense layer.
        sparse: a layer with a mixture of experts.
        after: what follows the layers.
        head: the output matrix, left out where it is the embedding.
    """

    layer: Parts
    sparse: Parts = ()
    before: Parts = (Part("model.embed_tokens.weight", "VH"),)
    prefix: str = "model.layers"
    after: Parts = (Part("model.norm.weight", "H", "norm"),)
    head: Part = Part("lm_head.weight", "VH", "head")

    def named(
        self,
        sizes: Mapping[str, int],
        layers: int,
        *,
        sparse: frozenset[int] = frozenset(),
        biased: frozenset[str] = frozenset(),
        tied: bool = False,
        parallel: bool = False,
    ) -> Iterator[ParameterShape]:
        """Every parameter once; arguments as the attributes of ``ModelShape``."""
        parts = [("", self.before)]
        for index in range(layers):
            parts.append((f"{self.prefix}.{index}.", self.sparse if index in sparse else self.layer))
        parts.append(("", self.after))
        for prefix, table in parts:
            for part in table:
                if not (part.sequential and parallel):
                    yield from _shapes(part, prefix, sizes, biased)
        head = list(_shapes(self.head, "", sizes, biased))
        yield from head[1:] if tied else head


def _shapes(
    part: Part, prefix: str, sizes: Mapping[str, int], biased: frozenset[str]
) -> Iterator[ParameterShape]:
    yield ParameterShape(prefix + part.name, tuple(sizes[letter] for letter in part.sizes))
    if part.bias in biased:
        name = part.name.removesuffix("weight") + "bias"
        yield ParameterShape(prefix + name, (sizes[part.outputs or part.sizes[0]],))


QKV = (
    Part("self_attn.q_proj.weight", "QH", "qkv"),
    Part("self_attn.k_proj.weight", "KH", "qkv"),
    Part("self_attn.v_proj.weight", "KH", "qkv"),
)
OUT = (Part("self_attn.o_proj.weight", "HQ", "out"),)
HEAD_NORMS = (Part("self_attn.q_norm.weight", "D"), Part("self_attn.k_norm.weight", "D"))
ALL_HEADS_NORMS = (Part("self_attn.q_norm.weight", "Q"), Part("self_attn.k_norm.weight", "K"))
GATED = (
    Part("mlp.gate_proj.weight", "IH", "mlp"),
    Part("mlp.up_proj.weight", "IH", "mlp"),
    Part("mlp.down_proj.weight", "HI", "mlp"),
)
ROUTER = (Part("mlp.gate.weight", "EH"),)
EXPERTS = (Part("mlp.experts.gate_up_proj", "EUH"), Part("mlp.experts.down_proj", "EHJ"))
INPUT_NORM = Part("input_layernorm.weight", "H", "norm")
ATTENDED_NORM = Part("post_attention_layernorm.weight", "H", "norm")
NORMS_BEFORE = (INPUT_NORM, ATTENDED_NORM)
NORMS_AFTER = (ATTENDED_NORM, Part("post_feedforward_layernorm.weight", "H"))
NORMS_BOTH = (INPUT_NORM, ATTENDED_NORM, Part("pre_feedforward_layernorm.weight", "H"), NORMS_AFTER[1])

LLAMA = Table((*QKV, *OUT, *GATED, *NORMS_BEFORE))
QWEN3 = Table((*QKV, *OUT, *HEAD_NORMS, *GATED, *NORMS_BEFORE))
GEMMA2 = Table((*QKV, *OUT, *GATED, *NORMS_BOTH))
GEMMA3 = Table((*QKV, *OUT, *HEAD_NORMS, *GATED, *NORMS_BOTH))
OLMO2 = Table((*QKV, *OUT, *ALL_HEADS_NORMS, *GATED, *NORMS_AFTER))
MIXTRAL = Table((), (*QKV, *OUT, *ROUTER, *EXPERTS, *NORMS_BEFORE))
QWEN3_MOE = Table(QWEN3.layer, (*QKV, *OUT, *HEAD_NORMS, *EXPERTS, *ROUTER, *NORMS_BEFORE))
COHERE = Table((*QKV, *OUT, *GATED, INPUT_NORM))
STABLELM = Table((*QKV, *OUT, *GATED, INPUT_NORM, Part(ATTENDED_NORM.name, "H", "norm", sequential=True)))
STARCODER2 = Table(
    (
        *QKV,
        *OUT,
        Part("mlp.c_fc.weight", "IH", "mlp"),
        Part("mlp.c_proj.weight", "HI", "mlp"),
        *NORMS_BEFORE,
    )
)
PHI = Table(
    (
        *QKV,
        Part("self_attn.dense.weight", "HQ", "out"),
        Part("mlp.fc1.weight", "IH", "mlp"),
        Part("mlp.fc2.weight", "HI", "mlp"),
        INPUT_NORM,
    ),
    after=(Part("model.final_layernorm.weight", "H", "norm"),),
)
PHI3 = Table(
    (
        *OUT,
        Part("self_attn.qkv_proj.weight", "FH"),
        Part("mlp.gate_up_proj.weight", "GH"),
        Part("mlp.down_proj.weight", "HI"),
        *NORMS_BEFORE,
    )
)
GPT_NEOX = Table(
    (
        *NORMS_BEFORE,
        Part("attention.query_key_value.weight", "FH", "qkv"),
        Part("attention.dense.weight", "HQ", "out"),
        Part("mlp.dense_h_to_4h.weight", "IH", "mlp"),
        Part("mlp.dense_4h_to_h.weight", "HI", "mlp"),
    ),
    before=(Part("gpt_neox.embed_in.weight", "VH"),),
    prefix="gpt_neox.layers",
    after=(Part("gpt_neox.final_layer_norm.weight", "H", "norm"),),
)
GPT2 = Table(  # its matrices are stored input first
    (
        Part("ln_1.weight", "H", "norm"),
        Part("attn.c_attn.weight", "HF", "qkv", outputs="F"),
        Part("attn.c_proj.weight", "QH", "out", outputs="H"),
        Part("ln_2.weight", "H", "norm"),
        Part("mlp.c_fc.weight", "HI", "mlp", outputs="I"),
        Part("mlp.c_proj.weight", "IH", "mlp", outputs="H"),
    ),
    before=(Part("transformer.wte.weight", "VH"), Part("transformer.wpe.weight", "PH")),
    prefix="transformer.h",
    after=(Part("transformer.ln_f.weight", "H", "norm"),),
)
