"""How long an optimizer's threads, hooks and buffers live: as long as it does, in its own process."""

import os
import weakref
from contextlib import ExitStack

from headrace.errors import UserError
from headrace.lanes.lanes import Lanes
from headrace.memory.tiers import release


class Lifetime:
    """Ends what an optimizer owns when it is closed, freed by Python, or alive at exit.

    Args:
        owner: the optimizer; it is not kept alive.
        resources: ends hooks, threads and buffers.
        lanes: the threads among them.
    """

    def __init__(self, owner: object, resources: ExitStack, lanes: Lanes) -> None:
        self._process = os.getpid()
        # Also at exit: a thread inside torch when Python ends would abort the process.
        self._end = weakref.finalize(owner, release, resources, lanes, self._process)

    @property
    def usable(self) -> bool:
        """Whether the threads are here to work."""
        return self._end.alive and os.getpid() == self._process

    def close(self) -> None:
        """End everything, once."""
        self._end()

    def check_open(self, what: str) -> None:
        """Raise UserError after :meth:`close`; ``what`` was asked for."""
        if not self._end.alive:
            raise UserError(
                f"{what} came after close(), which gave the states and threads of this OffloadedAdamW back: "
                "close it later, or build a new one"
            )

    def check_usable(self, what: str) -> None:
        """Raise UserError after :meth:`close` and in a fork of the process."""
        if os.getpid() != self._process:
            raise UserError(
                f"{what} was called in process {os.getpid()}, a fork, but OffloadedAdamW's threads are in "
                f"process {self._process}: build the optimizer in the process that trains"
            )
        self.check_open(what)
