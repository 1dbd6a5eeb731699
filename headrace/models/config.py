"""Which model is trained, and in which dtype its weights work."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from headrace.config import Config, Number


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) and value != "all-linear" else value


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021) that are trained instead of the model's weights."""

    rank: int = Field(
        16, gt=0, description="rank of each adapter, which has rank x (inputs + outputs) numbers"
    )
    alpha: Number = Field(32.0, gt=0, description="adapters count alpha / rank times")
    targets: Annotated[
        Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(_listed)
    ] = Field(
        "all-linear",
        description="linear layers with an adapter: all but the output, or a list of names such as q_proj",
    )


class ModelConfig(Config):
    """The model to start from."""

    path: str = Field(
        min_length=1,
        description="Hugging Face directory, .gguf file, config.json (random weights from train.seed), or "
        "org/name[@revision] of a model in the hub's local cache",
    )
    dtype: Literal["bf16", "fp32"] = Field(
        "bf16", description="dtype of the working weights and gradients; master weights are always fp32"
    )
    lora: LoraConfig | None = Field(
        None, description="train adapters of low rank instead of the weights, see docs/lora.md"
    )
