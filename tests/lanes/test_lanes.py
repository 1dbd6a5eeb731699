import threading
import time

import pytest
import torch

from headrace.lanes.lanes import Lanes
from headrace.lanes.workers import Workers
from headrace.ledger import Ledger
from headrace.schedule.action import parse

TIMEOUT = 30


@pytest.fixture
def lanes():
    lanes = Lanes(torch.device("cpu"), Ledger(), workers=2)
    yield lanes
    lanes.close()


def test_a_lane_keeps_its_order_and_books_bytes(lanes):
    order = []

    def work(index):
        order.append(index)
        return index

    events = [lanes.submit(parse(f"0DOWN0.b{i}"), lambda i=i: work(i)) for i in range(20)]
    lanes.wait(events[-1])
    assert order == list(range(20))
    assert lanes.ledger.lane_bytes("d2h") == sum(range(20))
    records = lanes.trace.records()
    assert [str(r.action) for r in records] == [f"0DOWN0.b{i}" for i in range(20)]
    assert all(r.start <= r.end for r in records)


def test_events_order_lanes_between_each_other(lanes):
    gate, seen = threading.Event(), []

    def down():
        assert gate.wait(TIMEOUT)
        seen.append("down")
        return 0

    first = lanes.submit(parse("0DOWN0.b0"), down)
    second = lanes.submit(parse("0U.b0"), lambda: seen.append("update") or 0, after=[first])
    third = lanes.submit(parse("0UP.b0"), lambda: seen.append("up") or 0, after=[second])
    assert not third.done
    gate.set()
    lanes.wait(third)
    assert seen == ["down", "update", "up"]


def test_waiting_is_booked_as_a_stall_of_the_lane_waited_for(lanes):
    event = lanes.submit(parse("0U.b0"), lambda: time.sleep(0.05) or 0)
    lanes.wait(event)
    lanes.wait(event)
    assert set(lanes.ledger.stalls) == {"cpu"}
    assert lanes.ledger.stalls["cpu"] > 0


def test_a_failure_reaches_those_who_wait_and_the_lane_goes_on(lanes):
    def fail():
        raise OSError("disk gone")

    bad = lanes.submit(parse("0DOWN0.b0"), fail)
    dependent = lanes.submit(parse("0U.b0"), lambda: pytest.fail("must not run"), after=[bad])
    with pytest.raises(OSError, match="disk gone"):
        lanes.wait(dependent)
    good = lanes.submit(parse("0DOWN0.b1"), lambda: 7)
    lanes.wait(good)
    assert lanes.ledger.lane_bytes("d2h") == 7


def test_compute_is_the_callers_thread(lanes):
    with lanes.compute(parse("0F0")):
        pass
    assert lanes.ledger.actions[parse("0F0")].count == 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_workers_run_every_share_once_on_one_thread_each(count):
    workers, seen = Workers(count), []

    def share(index):
        seen.append((index, threading.get_ident()))
        assert index == 0 or torch.get_num_threads() == 1

    before = torch.get_num_threads()
    for _ in range(3):
        workers.run(share)
    assert sorted(index for index, _ in seen) == sorted([*range(count)] * 3)
    assert len({thread for _, thread in seen}) == count
    assert torch.get_num_threads() == before
    workers.close()


def test_a_failing_share_is_raised_after_the_others_ended():
    workers, ended = Workers(3), []

    def share(index):
        if index == 1:
            raise ValueError("share 1")
        ended.append(index)

    with pytest.raises(ValueError, match="share 1"):
        workers.run(share)
    assert sorted(ended) == [0, 2]
    workers.run(lambda index: None)
    workers.close()
