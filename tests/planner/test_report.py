"""The printed table, character by character."""

from dataclasses import replace

import pytest

from headrace.ledger import Ledger
from headrace.machine.machine import Machine
from headrace.planner.report import bar, labels, memory_table, unit_of
from headrace.planner.workload import Workload

MIB, GIB = 2**20, 2**30

PLAIN = Machine("plain", 2, {"ram": 3200 * MIB, "disk": 9 * GIB})
CARD = Machine("card", 2, {"device": 8 * GIB, "host": 60 * GIB})
WORK = Workload(512, 2, 4, loss_chunk=256)


def test_one_column_without_a_card() -> None:
    ledger = Ledger(steps=1, peaks={"ram": {"weights": 256 * MIB, "states": 1539 * MIB + MIB // 2}})
    ledger.peaks["ram"] |= {"activations": 1000, "other": 2 * MIB}
    assert memory_table(ledger, PLAIN) == "\n".join(
        [
            "MiB                    RAM",
            "weights              256.0",
            "master + moments   1,539.5",
            "activations           <0.1",
            "Python, torch          2.0",
            "total              1,797.5",
            "budget             3,200.0",
            "                  ███▍ 56%",
        ]
    )


def test_a_column_a_tier_with_a_card() -> None:
    held = {"device": {"weights": 3 * GIB, "logits": 2 * GIB, "activations": 4 * GIB}}
    held |= {"host": {"states": 61 * GIB, "gradients": GIB}}
    ledger = Ledger(steps=1, peaks=held, tier_peaks={"device": 7 * GIB})
    assert memory_table(ledger, CARD, WORK) == "\n".join(
        [
            "GiB                          device         host",
            "weights                         3.0",
            "gradients (fp32 sums)                        1.0",
            "master + moments                            61.0",
            "activations (recompute)         4.0",
            "logits (chunks of 256)          2.0",
            "highest at one time             7.0         62.0",
            "budget                          8.0         60.0",
            "                         █████▎ 88%  ██████ 103%",
        ]
    )


def test_labels_tell_what_is_done() -> None:
    assert labels(CARD, None)["other"] == "CUDA, Python, torch"
    assert labels(PLAIN, WORK)["gradients"] == "gradients (fp32 sums)"
    assert labels(PLAIN, replace(WORK, micro_batches=1))["gradients"] == "gradients"
    short = Workload(32, 1, activations="keep")
    assert labels(PLAIN, short)["logits"] == "logits (chunks of 32)"
    assert labels(PLAIN, short)["activations"] == "activations (keep)"


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, ""), (0.01, ""), (1 / 48, "▏"), (0.5, "███"), (0.999, "██████"), (1.0, "██████"), (7.0, "██████")],
)
def test_bars(share: float, drawn: str) -> None:
    assert bar(share) == drawn


def test_units() -> None:
    assert unit_of(4 * GIB - 1) == MIB
    assert unit_of(4 * GIB) == GIB


def test_nothing_at_all() -> None:
    assert "total" in memory_table(Ledger(), PLAIN)
