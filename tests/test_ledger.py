import json

import pytest

from headrace.ledger import Comparison, Ledger, compare
from headrace.schedule.action import parse


def filled():
    ledger = Ledger(steps=2, process_peak=1000, seconds=3.5)
    ledger.book(parse("0DOWN0.b1"), 0.5, 100)
    ledger.book(parse("0DOWN0.b1"), 0.25, 100)
    ledger.book(parse("0U.b1"), 1.0, 0)
    ledger.stall("cpu", 0.125)
    ledger.stall("cpu", 0.125)
    ledger.hold("host", "states", 70)
    ledger.hold("host", "states", 50)
    ledger.hold("host", "gradients", 30)
    ledger.hold_total("host", 90)
    return ledger


def test_books_and_peaks():
    ledger = filled()
    assert ledger.lane_bytes("d2h") == 200
    assert ledger.lane_seconds("d2h") == 0.75
    assert ledger.lanes == ["cpu", "d2h"]
    assert ledger.stalls == {"cpu": 0.25}
    assert ledger.peaks["host"] == {"states": 70, "gradients": 30}
    assert ledger.total("host") == 90


def test_json_round_trip():
    ledger = filled()
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


def test_a_prediction_without_totals_sums_its_purposes():
    ledger = Ledger()
    ledger.hold("host", "states", 70)
    ledger.hold("host", "buffers", 5)
    assert ledger.total("host") == 75


def test_unknown_purposes_are_a_bug():
    with pytest.raises(AssertionError):
        Ledger().hold("host", "stuff", 1)


def test_comparison_names_what_is_more_than_a_tenth_off():
    predicted, measured = filled(), filled()
    measured.hold("host", "gradients", 60)
    measured.book(parse("0DOWN0.b1"), 0.0, 10)
    noticed = {line.name: line for line in compare(predicted, measured) if line.noticeable}
    assert set(noticed) == {"host gradients"}
    assert noticed["host gradients"].difference == 1.0
    links = [line for line in compare(predicted, measured) if line.name == "d2h a step"]
    assert (links[0].predicted, links[0].measured) == (100, 105)


def test_differences():
    assert Comparison("x", 0, 0, "bytes").difference == 0
    assert Comparison("x", 0, 1, "bytes").noticeable
    assert not Comparison("x", 100, 109, "bytes").noticeable
    assert Comparison("x", 100, 89, "bytes").noticeable
