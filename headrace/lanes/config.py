"""Threads of the lanes."""

from typing import Literal

from pydantic import Field, PositiveInt

from headrace.config import Config


class ThreadsConfig(Config):
    """Part of the plan, since sums depend on them: a resumed run uses the numbers it was started with."""

    compute: PositiveInt | Literal["auto"] = Field(
        "auto", description="threads of forward and backward on a CPU; auto: the cores of this process"
    )
    update: PositiveInt | Literal["auto"] = Field(
        "auto", description="threads of the update on the cpu lane; auto: the cores of this process"
    )
