"""Budgets of the memory tiers, and what lives in which."""

from typing import Literal

from pydantic import Field

from headrace.config import Config, Size


class MemoryConfig(Config):
    """Budgets are refused before they would break. `auto` is what the machine has free at the start."""

    device: Size | Literal["auto"] = Field(
        "auto",
        description="budget of the accelerator's memory; without one, RAM is the only tier: use memory.host",
    )
    host: Size | Literal["auto"] = Field("auto", description="budget of RAM")
    weights: Literal["device"] = Field("device", description="where the working weights live")
    states: Literal["host"] = Field("host", description="where master weights and moments live")
    activations: Literal["keep", "recompute"] = Field(
        "recompute", description="keep what backward needs, or recompute each layer"
    )
