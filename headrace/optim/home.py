"""Sends new weights to where they live, if that is off the device."""

from collections.abc import Iterator, Sequence

from headrace.memory.weights import WeightStore
from headrace.optim.policies.base import Emission
from headrace.schedule.action import Action, Kind, Unit, Wait
from headrace.schedule.layout import Layout


def sent_home(emissions: Sequence[Emission], layout: Layout, off: WeightStore) -> Iterator[Emission]:
    """A policy's emissions in which weights that are off the device go to their home instead of up.

    In host memory the update itself writes them there. On the disk each path is written its part.
    """
    for emission in emissions:
        unit = emission.action.unit
        if emission.action.kind is not Kind.UP or unit is None or layout.buckets[unit.index].unit is None:
            yield emission
            continue
        updated = Wait(Action(Kind.UPDATE, unit=unit))
        for path in range(off.paths):
            action = Action(Kind.WRITE, unit=Unit("w", unit.index), path=path)
            yield Emission(action, (updated,), emission.visible, emission.place)


def leaves_staging(action: Action) -> bool:
    """Whether an action takes a bucket's new weights from where the update staged them."""
    to_disk = action.kind is Kind.WRITE and action.unit is not None and action.unit.kind == "w"
    return action.kind is Kind.UP or to_disk
