"""Byte budgets of the memory tiers: what would exceed one is refused before it is allocated."""

import threading

from headrace.config import format_size
from headrace.errors import UserError
from headrace.ledger import Ledger


class Budget:
    """The bytes of one tier, by purpose. Every change is booked in the ledger, so peaks are measured here.

    Args:
        tier: the ledger's name of the tier: ``device``, ``host``, ``disk`` or ``ram``.
        limit: bytes that may be held at once; None for no limit.
        ledger: where peaks are booked.
        knob: what the user can raise, named in the refusal (``memory.host``).
    """

    def __init__(self, tier: str, limit: int | None, ledger: Ledger, knob: str) -> None:
        self.tier = tier
        self.limit = limit
        self._ledger = ledger
        self._knob = knob
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """Bytes held now, over all purposes."""
        return sum(self._held.values())

    def reserve(self, purpose: str, nbytes: int, what: str) -> None:
        """Claim ``nbytes`` for a buffer that will be allocated next.

        Raises:
            UserError: if the budget would be exceeded; nothing is claimed then.
        """
        with self._lock:
            if self.limit is not None and self.held + nbytes > self.limit:
                raise UserError(
                    f"{what} needs {nbytes:,} bytes of {self.tier} memory, but {self.held:,} of the "
                    f"{self.limit:,} ({format_size(self.limit)}) allowed are taken: raise {self._knob} "
                    f"to at least {self.held + nbytes:,}"
                )
            self._change(purpose, nbytes)

    def note(self, purpose: str, nbytes: int) -> None:
        """Book bytes that somebody else allocated (autograd's gradients); negative when they are freed."""
        with self._lock:
            self._change(purpose, nbytes)

    def release(self, purpose: str, nbytes: int) -> None:
        """Give back bytes claimed by :meth:`reserve`."""
        with self._lock:
            self._change(purpose, -nbytes)

    def _change(self, purpose: str, nbytes: int) -> None:
        self._held[purpose] = self._held.get(purpose, 0) + nbytes
        assert self._held[purpose] >= 0, (self.tier, purpose, self._held[purpose])
        self._ledger.hold(self.tier, purpose, self._held[purpose])
        self._ledger.hold_total(self.tier, self.held)
