import mmap

import pytest
import torch

from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.memory.budget import Budget
from headrace.memory.pool import HostPool


def make(limit):
    ledger = Ledger()
    return HostPool(Budget("host", limit, ledger, "memory.host")), ledger


def test_buffers_are_exact_and_peaks_are_booked():
    pool, ledger = make(None)
    a = pool.take(1000, torch.float32, "states", "a")
    b = pool.take(3, torch.bfloat16, "buffers", "b")
    assert a.shape == (1000,) and b.dtype == torch.bfloat16
    assert not a.any()
    pool.give_back(a)
    c = pool.take(10, torch.float64, "buffers", "c")
    assert pool.budget.held == 6 + 80
    assert ledger.peaks["host"] == {"states": 4000, "buffers": 86}
    assert ledger.tier_peaks["host"] == 4006
    pool.give_back(b)
    pool.give_back(c)
    assert pool.budget.held == 0


def test_refused_with_numbers_and_knob_and_nothing_claimed():
    pool, _ = make(1000)
    pool.take(100, torch.float32, "states", "a")
    with pytest.raises(
        UserError, match=r"the gradients needs 604 bytes .* 400 of the 1,000 .*memory\.host to at least 1,004"
    ):
        pool.take(151, torch.float32, "gradients", "the gradients")
    assert pool.budget.held == 400
    pool.take(150, torch.float32, "gradients", "the gradients")


def test_memory_really_returns_to_the_system():
    pool, _ = make(None)

    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    buffer = pool.take(2**25, torch.float32, "buffers", "big")
    buffer.fill_(1.0)
    assert resident() - before > 0.9 * buffer.nbytes
    pool.give_back(buffer)
    del buffer
    assert resident() - before < 2**24


def test_empty_buffers():
    pool, _ = make(10)
    pool.give_back(pool.take(0, torch.float32, "states", "nothing"))
    assert pool.budget.held == 0


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)  # which no kernel knows
    pool, _ = make(2**20)
    buffer = pool.take(1000, torch.float32, "states", "a table")
    assert buffer.tolist() == [0.0] * 1000
    pool.give_back(buffer)
