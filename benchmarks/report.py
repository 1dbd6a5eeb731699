"""The last line of every benchmark: figures and checks as one JSON object."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Check:
    """One bound that a figure must keep."""

    name: str
    value: float
    bound: float
    holds: bool


def finish(figures: Mapping[str, float], checks: Sequence[Check], as_json: bool) -> None:
    """Print the checks that fail, the JSON object if asked for, and end with code 1 if a check fails."""
    failed = [check for check in checks if not check.holds]
    for check in failed:
        print(f"FAILS {check.name}: {check.value:.4g} against {check.bound:.4g}")
    print(f"{len(checks) - len(failed)} of {len(checks)} checks hold")
    if as_json:
        print(json.dumps({"figures": dict(figures), "checks": [asdict(check) for check in checks]}))
    sys.exit(1 if failed else 0)
