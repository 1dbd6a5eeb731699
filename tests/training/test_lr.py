"""The learning rate against transformers' schedules, closed formulas and edge cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from headrace.errors import UserError
from headrace.optim.config import OptimConfig
from headrace.training.lr import learning_rate


def course(steps: int, **settings: float | str) -> list[float]:
    if settings.get("schedule") != "wsd":  # a fall of its own is refused elsewhere
        settings.pop("decay", None)
    if settings.get("schedule") == "constant":
        settings.pop("min_lr", None)
    config = OptimConfig.model_validate({"lr": 1.0, **settings})
    return [learning_rate(step, steps, config) for step in range(steps)]


def transformers_course(name: str, warmup: int, steps: int, **settings: float | str) -> list[float]:
    """The rates of the run that is one step longer, from its second step on."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(name, optimizer, warmup + 1, steps + 1, scheduler_specific_kwargs=settings)
    rates = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


@pytest.mark.parametrize("warmup", [1, 7, 19])
@pytest.mark.parametrize("steps", [20, 101])
def test_equals_transformers(warmup: int, steps: int) -> None:
    linear = course(steps, schedule="linear", warmup=warmup)
    assert linear == pytest.approx(transformers_course("linear", warmup, steps), abs=1e-15)
    cosine = course(steps, schedule="cosine", warmup=warmup, min_lr=0.1)
    expected = transformers_course("cosine_with_min_lr", warmup, steps, min_lr_rate=0.1)
    assert cosine == pytest.approx(expected, abs=1e-15)
    constant = course(steps, schedule="constant", warmup=warmup)
    assert constant == pytest.approx(transformers_course("constant_with_warmup", warmup, steps), abs=1e-15)


def test_wsd_equals_transformers() -> None:
    ours = course(100, schedule="wsd", warmup=5, decay=0.2)
    expected = transformers_course("warmup_stable_decay", 5, 100, num_decay_steps=20, decay_type="linear")
    assert ours == pytest.approx(expected, abs=1e-15)
    assert ours[5:81] == [1.0] * 76
    assert ours[-1] == pytest.approx(1 / 20)


def test_closed_formula() -> None:
    rates = course(10, schedule="linear", warmup=0.2)
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    rates = course(4, schedule="cosine", warmup=0, min_lr=0.5)
    assert rates == pytest.approx([0.75 + 0.25 * math.cos(math.pi * step / 4) for step in range(4)])


schedules = st.sampled_from(["cosine", "linear", "constant", "wsd"])


@given(schedule=schedules, steps=st.integers(1, 300), warmup=st.floats(0, 0.5), decay=st.floats(0, 0.5))
def test_rises_to_the_peak_and_never_reaches_zero(
    schedule: str, steps: int, warmup: float, decay: float
) -> None:
    rates = course(steps, schedule=schedule, warmup=warmup, decay=decay)
    peak = rates.index(max(rates))
    assert max(rates) == 1
    assert min(rates) > 0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


@given(schedule=schedules, min_lr=st.floats(0, 1))
def test_one_step_has_the_peak_rate(schedule: str, min_lr: float) -> None:
    assert course(1, schedule=schedule, warmup=0.03, min_lr=min_lr) == [pytest.approx(1)]


def test_share_of_warmup_is_rounded_up_and_leaves_one_step() -> None:
    assert course(100, warmup=0.07).index(1) == 7
    assert course(10, warmup=0.03).index(1) == 1
    assert course(10, warmup=0.99).index(1) == 9


@pytest.mark.parametrize("warmup", [10, 11])
def test_warmup_longer_than_the_run_is_refused(warmup: int) -> None:
    with pytest.raises(UserError, match=rf"optim.warmup={warmup} steps leaves none of the run's 10"):
        course(10, warmup=warmup)


def test_part_of_a_warmup_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim.warmup=2.5 is neither a share"):
        course(10, warmup=2.5)


def test_warmup_and_decay_must_fit() -> None:
    with pytest.raises(UserError, match=r"optim.warmup=6 \(6 steps\) and optim.decay=0.6 \(6 steps\)"):
        course(10, schedule="wsd", warmup=6, decay=0.6)
    assert course(10, schedule="wsd", warmup=4, decay=0.6).index(1) == 4
    assert len(course(7, schedule="wsd", warmup=0.5, decay=0.5)) == 7
    assert course(10, schedule="wsd", warmup=0, decay=0) == [1.0] * 10


@pytest.mark.parametrize(
    "settings", [{"schedule": "cosine", "decay": 0.3}, {"schedule": "constant", "min_lr": 0.1}]
)
def test_settings_without_effect_are_refused(settings: dict[str, float | str]) -> None:
    with pytest.raises(ValueError, match=r"optim\.(decay|min_lr)="):
        OptimConfig.model_validate(settings)
