"""The course of the learning rate, as a pure function of the step."""

import math

from headrace.errors import UserError
from headrace.optim.config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of optimizer step ``step``, counted from 0, in a run of ``steps``.

    It rises in equal increments from zero to ``lr``, then falls on the schedule's curve to ``min_lr * lr``.
    Both ends lie one step outside the run, so that no step is spent at rate zero: with W warm-up steps the
    first rate is ``lr / (W + 1)``, step W has the peak, and the last step is one increment above the lowest
    rate: with a linear fall to zero ``lr / (steps - W)``, in wsd ``lr`` over the steps of the fall.

    The curves are those of transformers' schedules (linear, cosine with min_lr, warmup_stable_decay with
    a linear decay; Hu et al. 2024, arXiv:2404.06395) for a run one step longer, W included, and one step on.

    Raises UserError if warm-up and decay do not fit into the run, or if a number of steps is not whole.
    """
    assert 0 <= step < steps, (step, steps)
    warmup = _warmup_steps(steps, config)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    return config.lr * (config.min_lr + (1 - config.min_lr) * _height(step, steps, warmup, config))


def _height(step: int, steps: int, warmup: int, config: OptimConfig) -> float:
    """Where the rate stands between its lowest (0) and its peak (1)."""
    if config.schedule == "constant":
        return 1.0
    fall = _decay_steps(steps, warmup, config) if config.schedule == "wsd" else steps - warmup
    left = min(1.0, (steps - step) / fall) if fall else 1.0
    return (1 - math.cos(math.pi * left)) / 2 if config.schedule == "cosine" else left


def _warmup_steps(steps: int, config: OptimConfig) -> int:
    warmup = config.warmup
    if warmup < 1:
        return min(_share(warmup, steps), steps - 1)
    if not float(warmup).is_integer():
        raise UserError(
            f"optim.warmup={warmup:g} is neither a share of all steps (below 1) nor a whole number of steps"
        )
    if warmup >= steps:
        raise UserError(
            f"optim.warmup={warmup:g} steps leaves none of the run's {steps}; choose fewer, or a share of "
            "them such as 0.03"
        )
    return int(warmup)


def _decay_steps(steps: int, warmup: int, config: OptimConfig) -> int:
    decay = _share(config.decay, steps)
    if warmup + decay > steps + 1:  # one too many is two shares that were both rounded up
        raise UserError(
            f"optim.warmup={config.warmup:g} ({warmup} steps) and optim.decay={config.decay:g} "
            f"({decay} steps) do not fit into {steps} steps; lower one of them"
        )
    return min(decay, steps - warmup)


def _share(share: float, steps: int) -> int:
    # Rounded first, because 0.07 * 100 is a little more than 7.
    return math.ceil(round(share * steps, 6))
