"""Settings of the loop, and what it reports to."""

import math
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from headrace.config import Config, Number
from headrace.planner.workload import divisors

Report = Literal["tensorboard", "wandb"]
"""Where metrics go besides metrics.jsonl; the run file's `report` is a list of these."""


class TrainConfig(Config):
    """How long to train, on how much at a time. Without `steps` and `epochs` it is one epoch."""

    steps: PositiveInt | None = Field(None, le=10**9, description="optimizer steps to train; or give epochs")
    epochs: Number | None = Field(
        None, gt=0, le=10**6, description="passes over the training data, fractions allowed; or give steps"
    )
    batch: PositiveInt = Field(16, le=2**20, description="sequences of an optimizer step, over all ranks")
    micro_batch: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="sequences of one forward and backward; batch / micro_batch of them make a step",
    )
    eval_every: PositiveInt = Field(
        50, description="steps between evaluations; a run with data.eval also ends with one"
    )
    max_skipped: PositiveInt = Field(
        5, description="the run stops after so many steps in a row whose gradient was not finite"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of the data order and of dropout")
    loss_chunk: PositiveInt = Field(
        512, description="tokens whose logits exist at a time: fewer need less memory, more are faster"
    )

    compile: bool = Field(
        False,
        description="compile norms and feed-forward layers with torch.compile; needs a compiler, and "
        "results are equal to rounding only",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        steps, epochs = values.get("steps"), values.get("epochs")
        if steps is not None and epochs is not None:
            raise ValueError(f"train.steps={steps} and train.epochs={epochs} contradict each other; keep one")
        return {**values, "epochs": 1} if steps is None and epochs is None else values

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> "TrainConfig":
        if self.micro_batch != "auto" and self.batch % self.micro_batch:
            fitting = max(n for n in divisors(self.batch) if n < self.micro_batch)
            raise ValueError(
                f"train.batch={self.batch} is not a multiple of train.micro_batch={self.micro_batch}; "
                f"choose for example train.micro_batch={fitting}"
            )
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step, once `micro_batch` is a number."""
        assert self.micro_batch != "auto", "train.micro_batch is filled in by the plan"
        return self.batch // self.micro_batch

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run; part of an epoch is rounded up to whole steps."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(round(self.epochs * steps_per_epoch, 6)))
