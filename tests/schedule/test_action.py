import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule.action import UNITS, Action, Kind, StepShape, Unit, Wait, bucket, parse, waits

numbers = st.integers(0, 10**6)
maybe = st.none() | numbers
units = st.none() | st.builds(Unit, st.sampled_from("".join(UNITS)), numbers)
off_path = st.builds(
    Action,
    st.sampled_from([k for k in Kind if k not in (Kind.READ, Kind.WRITE)]),
    numbers,
    maybe,
    maybe,
    units,
)
on_path = st.builds(Action, st.sampled_from([Kind.READ, Kind.WRITE]), numbers, maybe, maybe, units, numbers)


@given(off_path | on_path)
def test_text_round_trip(action):
    assert parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("0F2", "compute"),
        ("2F0s3", "compute"),
        ("0U.b12", "cpu"),
        ("0READ.b7@p1", "read:p1"),
        ("0WRITE1.g7@p0", "write:p0"),
        ("1DOWN0.b3", "d2h"),
    ],
)
def test_examples_print_and_know_their_lane(text, lane):
    action = parse(text)
    assert str(action) == text
    assert action.lane == lane


@pytest.mark.parametrize("text", ["", "F", "0Q1", "0F1x", "0READ.b7", "0F2@p1", "-1F0", "0F 1", "0Fs"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"0READ\.b7@p1|belongs to READ"):
        parse(text)


def step_actions(step):
    buckets = [bucket(b) for b in range(step.buckets)]
    for m in range(step.microbatches):
        yield Action(Kind.FORWARD, microbatch=m)
        for unit in buckets:
            yield Action(Kind.BACKWARD, microbatch=m, unit=unit)
            yield Action(Kind.DOWN, microbatch=m, unit=unit)
        yield Action(Kind.BACKWARD, microbatch=m)
    yield from (Action(Kind.NORM, unit=unit) for unit in buckets)
    yield Action(Kind.CLIP)
    for unit in buckets:
        yield Action(Kind.UPDATE, unit=unit)
        yield Action(Kind.UP, unit=unit)


@given(st.integers(1, 4), st.integers(1, 5))
def test_the_order_of_a_synchronous_step_satisfies_every_wait(microbatches, buckets):
    step = StepShape(microbatches, buckets)
    actions = list(step_actions(step))
    place = {action: number for number, action in enumerate(actions)}
    for action in actions:
        for wait in waits(action, step):
            assert wait.action in place, f"{action} waits for {wait.action}, which no step has"
            assert wait.steps_back or place[wait.action] < place[action]


def test_rules_across_steps():
    step = StepShape(2, 2)
    assert waits(parse("0F0"), step) == (Wait(parse("0UP.b0"), 1), Wait(parse("0UP.b1"), 1))
    assert waits(parse("0F1"), step) == (Wait(parse("0B0")),)
    assert waits(parse("0DOWN1.b1"), step) == (Wait(parse("0B1.b1")), Wait(parse("0U.b1"), 1))
    assert waits(parse("0NORM.b0"), step) == (Wait(parse("0DOWN0.b0")), Wait(parse("0DOWN1.b0")))
    assert waits(parse("0CLIP"), step) == (Wait(parse("0NORM.b0")), Wait(parse("0NORM.b1")))
