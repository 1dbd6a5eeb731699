"""Machines that people have, by name, to plan for one that is not at hand."""

from headrace.errors import UserError
from headrace.machine.machine import Machine

GIB = 2**30

CARD_RESERVED = GIB // 2
"""Bytes of a card that the driver and a desktop keep; an assumption, not a measurement."""

SYSTEM_RESERVED = 4 * GIB
"""Bytes of RAM left to the operating system and a browser; an assumption, not a measurement."""


def _card(gib: int, host_gib: int = 64, cores: int = 8) -> Machine:
    tiers = {"device": gib * GIB - CARD_RESERVED, "host": host_gib * GIB - SYSTEM_RESERVED}
    return Machine(f"{gib} GB card, {host_gib} GB RAM", cores, tiers)


def _laptop(gib: int, cores: int = 8) -> Machine:
    return Machine(f"{gib} GB RAM, no card", cores, {"ram": gib * GIB - SYSTEM_RESERVED})


PRESETS: dict[str, Machine] = {
    "card-8gb": _card(8),  # RTX 3070, 4060
    "card-12gb": _card(12),  # RTX 3060, 4070
    "card-16gb": _card(16),  # RTX 4060 Ti, 4080, 5080
    "card-24gb": _card(24),  # RTX 3090, 4090
    "card-32gb": _card(32),  # RTX 5090
    "card-24gb-128gb": _card(24, host_gib=128, cores=16),
    "laptop-16gb": _laptop(16),
    "laptop-32gb": _laptop(32),
    "workstation-128gb": _laptop(128, cores=16),
}
"""Name -> machine. Card memory is sold in GB and counted in GiB; cores are typical ones."""


def preset(name: str) -> Machine:
    """The preset of that name.

    Raises:
        UserError: if there is none.
    """
    if name not in PRESETS:
        raise UserError(f"the machine {name!r} is not known: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
