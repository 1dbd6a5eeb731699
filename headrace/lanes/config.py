"""Threads of the lanes."""

from typing import Annotated, Literal

from pydantic import Field

from headrace.config import Config

Threads = Annotated[int, Field(ge=1, le=512)]
"""Far more than help anywhere; libraries crash when asked for a hundred thousand."""


class ThreadsConfig(Config):
    """Part of the plan: a resumed run uses the numbers it was started with, unless it is given others.

    The sums of forward and backward depend on ``compute``; nothing depends on ``update`` but speed.
    """

    compute: Threads | Literal["auto"] = Field(
        "auto", description="threads of forward and backward on a CPU; auto: OMP_NUM_THREADS or update's"
    )
    update: Threads | Literal["auto"] = Field(
        "auto",
        description="threads of the update; auto: the cores of this process by affinity, quota, launcher",
    )
