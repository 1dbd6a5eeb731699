"""When checkpoints are written, how many stay, and where a run goes on."""

from typing import Annotated, Literal

from pydantic import Field

from headrace.config import Config

WITHOUT_STATES = "checkpoint.states=false: checkpoints hold weights only, so this run cannot resume"
"""What plans and runs say at the start."""


class CheckpointConfig(Config):
    """Everything here may change between a run and its continuation."""

    every: int = Field(100, ge=0, description="optimizer steps between checkpoints; 0: only at the end")
    keep: int = Field(1, ge=1, description="complete checkpoints that stay; space is needed for one more")
    states: bool = Field(
        True, description="save optimizer states; false: the model alone, from which no run can go on"
    )
    resume: Literal["auto", "never"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="auto: from the newest complete checkpoint; never: from the start; or the step of one",
    )
    accept_changes: bool = Field(
        False, description="go on although settings changed that make it another run"
    )
