"""A machine as the planner sees it: memory tiers with capacities, and cores."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TIERS = ("device", "ram", "host", "disk")
"""Names of tiers, in the order of tables. Without an accelerator ``ram`` is both device and host."""


@dataclass(frozen=True)
class Machine:
    """Memory tiers and cores.

    Attributes:
        name: what tables and messages call it.
        cores: processor cores that this process may use.
        tiers: tier -> bytes that this process may hold there: either ``device`` and ``host``, or ``ram``
            alone; with ``disk``, where one was looked at.
    """

    name: str
    cores: int
    tiers: Mapping[str, int]

    def __post_init__(self) -> None:
        memory = set(self.tiers) - {"disk"}
        assert memory in ({"ram"}, {"device", "host"}), f"tiers {sorted(self.tiers)}"
        assert self.cores >= 1 and min(self.tiers.values()) >= 0, self
        object.__setattr__(self, "tiers", MappingProxyType(dict(self.tiers)))

    @property
    def unified(self) -> bool:
        """Whether device and host are one tier, ``ram``."""
        return "ram" in self.tiers

    @property
    def device_tier(self) -> str:
        """The tier of weights and activations."""
        return "ram" if self.unified else "device"

    @property
    def host_tier(self) -> str:
        """The tier of optimizer states."""
        return "ram" if self.unified else "host"
