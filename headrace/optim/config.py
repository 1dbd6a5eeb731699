"""Settings of the optimizer and of its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headrace.config import Config, Number

LARGEST = 1e38
"""The round number below which everything is finite in fp32 and bf16."""


class OptimConfig(Config):
    """AdamW (Loshchilov and Hutter 2019) and the course of its learning rate."""

    lr: Number = Field(1e-5, gt=0, le=LARGEST, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="course of the learning rate after the warm-up; wsd: warm-up, stable, decay"
    )
    warmup: Number = Field(
        0.03, ge=0, description="warm-up: a share of all steps below 1, else a number of steps"
    )
    decay: Number = Field(
        0.2, ge=0, le=1, description="wsd only: the share of all steps in which the rate falls"
    )
    min_lr: Number = Field(0.0, ge=0, le=1, description="what the rate falls to, as a share of lr")
    weight_decay: Number = Field(
        0.1, ge=0, le=LARGEST, description="decoupled decay of matrices; never of norms and biases"
    )
    beta1: Number = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: Number = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: Number = Field(1e-8, gt=0, le=LARGEST, description="added to the root of the second moment")
    max_grad_norm: Number = Field(
        1.0, ge=0, le=LARGEST, description="gradients are scaled down to this global norm; 0: never"
    )

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> "OptimConfig":
        if self.decay != type(self).model_fields["decay"].default and self.schedule != "wsd":
            raise ValueError(f"optim.decay={self.decay:g} belongs to optim.schedule=wsd, not {self.schedule}")
        if self.min_lr and self.schedule == "constant":
            raise ValueError(
                f"optim.min_lr={self.min_lr:g} has no effect with optim.schedule=constant: remove it"
            )
        return self


class UpdateConfig(Config):
    """When and where the optimizer updates; `update: sync` is short for `update: {policy: sync}`."""

    policy: Literal["sync"] = Field("sync", description="sync: every step waits for its own update")
    bucket: int = Field(2**24, ge=2**16, multiple_of=2**16, description="elements of a bucket")
    window: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="memory.states=disk only: buckets of states in RAM at once; auto: as many as fit",
    )
