"""`sync`: every step waits for its own update, so the numbers are those of plain AdamW.

ZeRO-Offload's synchronous schedule (Ren et al. 2021, section 4): gradients leave as backward completes them,
the update runs on the host after the global norm is known, new weights return bucket by bucket.
"""

from collections.abc import Sequence

from headrace.optim.policies.base import Emission, Policy
from headrace.schedule.action import Action, Kind, StepShape, bucket, waits
from headrace.schedule.layout import Bucket


class Sync(Policy):
    """Updates on the ``cpu`` lane after the clip factor is known; visible at the end of the same step."""

    def gradient(self, microbatch: int, bucket_: Bucket, step: StepShape) -> Sequence[Emission]:
        """Send the bucket's gradients down."""
        return [_by_rule(Action(Kind.DOWN, microbatch=microbatch, unit=bucket(bucket_.index)), step)]

    def update(self, buckets: Sequence[Bucket], step: StepShape) -> Sequence[Emission]:
        """Norms, the clip factor, then each bucket's update and the way back of its weights."""
        units = [bucket(b.index) for b in buckets]
        actions = [Action(Kind.NORM, unit=unit) for unit in units]
        actions.append(Action(Kind.CLIP))
        for unit in units:
            actions += [Action(Kind.UPDATE, unit=unit), Action(Kind.UP, unit=unit)]
        return [_by_rule(action, step) for action in actions]


def _by_rule(action: Action, step: StepShape) -> Emission:
    return Emission(action, waits(action, step))
