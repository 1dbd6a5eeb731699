"""Which model is trained, and in which dtype its weights work."""

from typing import Literal

from pydantic import Field

from headrace.config import Config


class ModelConfig(Config):
    """The model to start from."""

    path: str = Field(
        min_length=1,
        description="Hugging Face directory, .gguf file, or config.json (random weights from train.seed)",
    )
    dtype: Literal["bf16", "fp32"] = Field(
        "bf16", description="dtype of the working weights and gradients; master weights are always fp32"
    )
