"""Link lanes on a CUDA device: a stream each, never ahead of compute, buffers pinned at their exact size."""

import threading

import pytest
import torch

from headrace.lanes.lanes import Lanes
from headrace.ledger import Ledger
from headrace.memory.budget import Budget
from headrace.memory.pool import HostPool
from headrace.schedule.action import parse

DEVICE = torch.device("cuda")


@pytest.fixture
def lanes():
    made = Lanes(DEVICE, Ledger(), workers=1)
    yield made
    made.close()


@pytest.fixture
def pool():
    return HostPool(Budget("host", 2**30, Ledger(), "memory.host"), pin=True)


def test_buffers_are_pinned_at_their_exact_size_and_given_back(pool):
    buffer = pool.take(3 * 2**20 + 5, torch.bfloat16, "buffers", "a test's buffer")
    assert buffer.is_pinned()
    assert buffer.untyped_storage().nbytes() == 2 * (3 * 2**20 + 5)
    pool.give_back(buffer)
    assert not buffer.is_pinned()


def test_a_link_waits_for_what_compute_has_queued(lanes, pool):
    buffer = pool.take(2048 * 2048, torch.float32, "buffers", "a test's buffer")
    x_NN = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(5):
        y_NN = x_NN
        for _ in range(20):
            y_NN = (y_NN @ x_NN).tanh()

        def down(source=y_NN):
            buffer.view(2048, 2048).copy_(source, non_blocking=True)
            return source.nbytes

        lanes.wait(lanes.submit(parse("0DOWN0.b0"), down))
        assert torch.equal(buffer.view(2048, 2048), y_NN.cpu())


def test_each_link_has_a_stream_of_its_own(lanes):
    streams, both = {}, threading.Barrier(2, timeout=60)

    def note(lane):
        streams[lane] = torch.cuda.current_stream(DEVICE).cuda_stream
        both.wait()
        return 0

    down = lanes.submit(parse("0DOWN0.b0"), lambda: note("d2h"))
    up = lanes.submit(parse("0UP.b0"), lambda: note("h2d"))
    for event in (down, up):
        lanes.wait(event)
    streams["compute"] = torch.cuda.current_stream(DEVICE).cuda_stream
    assert len(set(streams.values())) == 3
