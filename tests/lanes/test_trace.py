import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.lanes.trace import Record, Trace, chrome_trace, dump, lane_order, read, step_spans
from headrace.schedule.action import parse

STEP = ["0F0", "0B0", "0DOWN0.b0", "0NORM.b0", "0CLIP", "0U.b0", "0UP.b0"]


def step(number, actions=STEP, begin=100.0):
    """A step of one second, each action a tenth of one."""
    start = begin + number
    return [
        Record(number, parse(text), start + place / 10, start + (place + 1) / 10, 8 * place)
        for place, text in enumerate(actions)
    ]


def filled(records, capacity=20_000):
    trace = Trace(capacity)
    for record in records:
        trace.add(record)
    return trace


def test_the_last_steps_are_kept_in_order():
    trace = filled([record for number in range(9) for record in step(number)])
    assert trace.last_steps(3) == [record for number in (6, 7, 8) for record in step(number)]
    assert trace.last_steps(99) == trace.records()


@given(capacity=st.integers(1, 40), steps=st.integers(0, 9))
def test_a_step_that_lost_records_is_left_out_and_the_rest_bounded(capacity, steps):
    records = [record for number in range(steps) for record in step(number)]
    kept = filled(records, capacity).last_steps(99)
    assert len(kept) <= capacity
    whole = len(kept) // len(STEP)
    if whole:
        assert kept == records[-whole * len(STEP) :]


def test_a_step_larger_than_the_ring_is_shown_as_far_as_it_goes():
    assert filled(step(0), capacity=3).last_steps() == step(0)[-3:]


def test_what_is_written_reads_back_to_a_microsecond(tmp_path):
    records = step(4) + step(5)
    path = tmp_path / "trace.json"
    path.write_text(dump(records), encoding="utf-8")
    found = read(path)
    assert [(r.step, r.action, r.nbytes) for r in found] == [(r.step, r.action, r.nbytes) for r in records]
    for a, b in zip(found, records, strict=True):
        assert (a.start, a.end) == pytest.approx((b.start - 104, b.end - 104), abs=1e-6)
    assert dump(found) == path.read_text(encoding="utf-8")
    assert json.loads(dump([])) == {"actions": [], "records": []}


def test_the_file_is_small():
    """An 8B model has 500 buckets; with four micro-batches that is 3,500 records a step."""
    buckets = [
        f"0{kind}.b{b}" for b in range(500) for kind in ("DOWN0", "DOWN1", "DOWN2", "DOWN3", "NORM", "U")
    ]
    text = dump([record for number in range(4) for record in step(number, buckets)])
    assert len(text) < 45 * 4 * len(buckets)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"actions": ["0Z"], "records": []}', '{"actions": [], '
                                  '"records": [[0, 0, 1, 2, 3]]}'])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"trace\.json is damaged"):
        read(path)


def test_lanes_stand_in_the_order_of_a_step():
    actions = ["0WRITE.b0@p0", "0UP.b0", "0READ.b0@p0", "0F0", "0U.b0", "0DOWN0.b0"]
    assert lane_order(step(0, actions)) == ["compute", "d2h", "cpu", "h2d", "read:p0", "write:p0"]


def test_a_step_spans_all_of_its_lanes():
    assert step_spans(step(1) + step(0)) == [(0, 100.0, 100.7), (1, 101.0, pytest.approx(101.7))]


def test_chrome_events_are_the_records_on_named_tracks():
    records = step(2)
    trace = chrome_trace(records)
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["steps", "compute", "d2h", "cpu", "h2d"]
    slices = [e for e in events if e["ph"] == "X"]
    assert (slices[0]["name"], names[slices[0]["tid"]]) == ("step 3", "steps")
    for event, record in zip(slices[1:], records, strict=True):
        assert names[event["tid"]] == record.action.lane
        assert event["args"] == {"action": str(record.action), "step": 3, "bytes": record.nbytes}
        assert (event["ts"], event["dur"]) == pytest.approx((1e6 * record.start, 1e5))
    assert [e["name"] for e in slices[1:4]] == ["forward 0", "backward 0", "gradients down 0 b0"]
    assert json.loads(json.dumps(trace)) == trace
