"""States on the disk give the bits of states in memory, and move no more bytes than the method says."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RunStopped, UserError
from headrace.memory import blocks
from headrace.memory.disk import DiskPath
from headrace.optim.offloaded import OffloadedAdamW, SkippedStep
from headrace.schedule.action import Kind
from headrace.schedule.layout import BLOCK
from headrace.schedule.window import AHEAD

SIZES = [(3 * BLOCK + 5,), (100, 700), (BLOCK,), (17,), (2 * BLOCK, 2)]


def make(sizes, dtype, **options):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    settings = {"lr": 1e-2, "max_grad_norm": 1.0, "bucket": BLOCK, "workers": 2}
    return parameters, OffloadedAdamW(parameters, **settings, **options)


def paths(home, count):
    """Unequal ones."""
    return [DiskPath(Path(home) / str(number), speed=1.0 + number) for number in range(count)]


def step(parameters, optimizer, number, absent=(), bad=False):
    draw = torch.Generator().manual_seed(number)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        parameter.grad = None if index in absent else gradient
    if bad:
        parameters[0].grad.view(-1)[3] = float("nan")
        with pytest.warns(SkippedStep):
            optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()


def same(ours, theirs):
    """Weights, and every table of every parameter."""
    (left, a), (right, b) = ours, theirs
    weights = all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    places = [(table, name) for table in a.tables for name in a.names]
    return weights and all(
        torch.equal(torch.cat(a.pieces(*place)), torch.cat(b.pieces(*place))) for place in places
    )


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(1, 3),
    st.integers(1, 14),
    st.lists(
        st.tuples(st.sets(st.integers(0, len(SIZES) - 1), max_size=len(SIZES)), st.booleans(), st.booleans()),
        min_size=1,
        max_size=6,
    ),
)
def test_bits_are_those_of_states_in_memory(tmp_path_factory, dtype, count, window, script):
    """Whatever the window and the paths, with parameters left out, steps skipped, and states looked at."""
    home = tmp_path_factory.mktemp("disk")
    in_memory = make(SIZES, dtype)
    on_disk = make(SIZES, dtype, disk=paths(home, count), window=window)
    for number, (absent, bad, look) in enumerate(script):
        for parameters, optimizer in (in_memory, on_disk):
            step(parameters, optimizer, number, absent - {0} if bad else absent, bad)
        assert not look or same(on_disk, in_memory)
    assert same(on_disk, in_memory)
    for _, optimizer in (in_memory, on_disk):
        optimizer.close()
    assert not list(home.iterdir()), "files are left"


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_released_gradients_too(tmp_path, micro_batches):
    options = {"release_gradients": True, "micro_batches": micro_batches}
    in_memory = make(SIZES, torch.bfloat16, **options)
    on_disk = make(SIZES, torch.bfloat16, disk=paths(tmp_path, 2), **options)
    for number in range(4):
        for parameters, optimizer in (in_memory, on_disk):
            for micro_batch in range(micro_batches):
                draw = torch.Generator().manual_seed(10 * number + micro_batch)
                factors = [torch.randn(p.shape, generator=draw).to(p.dtype) for p in parameters]
                sum((p * f).sum() for p, f in zip(parameters, factors, strict=True)).backward()
            optimizer.step()
    assert same(on_disk, in_memory)


@pytest.mark.parametrize("window", [1, 2, 4, 6, 20])
def test_bytes_are_those_of_the_method(tmp_path, window):
    """Of n buckets n - c are read and written in a step; the parts' bytes add up to 12 an element."""
    numel, count = 9 * BLOCK, 2
    parameters, optimizer = make([(numel,)], torch.bfloat16, disk=paths(tmp_path, count), window=window)
    left = numel // BLOCK if window >= 9 else max(0, window - AHEAD)
    steps = 5
    for number in range(steps):
        step(parameters, optimizer, number)
    optimizer._engine.drain()
    moved = {kind: {} for kind in (Kind.READ, Kind.WRITE)}
    for action, account in optimizer.ledger.actions.items():
        if action.kind in moved:
            sums = moved[action.kind].setdefault(action.lane, [0, 0])
            sums[0] += account.nbytes
            sums[1] += account.count
    loads = 0 if window >= 9 else left  # the first step finds none of what later ones find
    for kind, lanes in moved.items():
        extra = loads if kind is Kind.READ else 0
        buckets = steps * (9 - left) + extra if window < 9 or kind is Kind.READ else 0
        buckets = 9 if window >= 9 and kind is Kind.READ else buckets
        assert sum(nbytes for nbytes, _ in lanes.values()) == buckets * BLOCK * 12
        assert all(number == buckets for _, number in lanes.values())
    optimizer.close()


def test_the_order_alternates(tmp_path):
    parameters, optimizer = make([(5 * BLOCK,)], torch.bfloat16, disk=paths(tmp_path, 1), window=4)
    for number in range(3):
        step(parameters, optimizer, number)
    records = optimizer.lanes.trace.records()
    updates = [(r.step, r.action.unit.index) for r in records if r.action.kind is Kind.UPDATE]
    up, down = list(range(5)), list(reversed(range(5)))
    assert [index for _, index in updates] == [*up, *down, *up]
    optimizer.close()


def test_memory_is_the_window(tmp_path):
    _, optimizer = make([(9 * BLOCK,)], torch.bfloat16, disk=paths(tmp_path, 1), window=4, kept=1)
    assert optimizer.ledger.peaks["ram"]["states"] == 4 * BLOCK * 12
    on_disk = optimizer.ledger.peaks["disk"]["states"]
    assert on_disk == 9 * BLOCK * 12
    optimizer.close()
    with pytest.raises(UserError, match=r"place 3 of the window \(update\.window\)"):
        make([(9 * BLOCK,)], torch.bfloat16, disk=paths(tmp_path, 1), window=4, host=4 * BLOCK * 12 - 1)
    with pytest.raises(UserError, match=r"memory\.disk allows 1MiB: raise it to at least"):
        make([(9 * BLOCK,)], torch.bfloat16, disk={str(tmp_path): "1MiB"})


def test_a_failing_disk_ends_the_step_in_one_sentence(tmp_path, monkeypatch):
    parameters, optimizer = make(SIZES, torch.bfloat16, disk=paths(tmp_path, 1), window=2)
    step(parameters, optimizer, 0)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(blocks, "read_at", fail)
    with pytest.raises(RunStopped, match=r"cannot be read \(Input/output error\)"):
        step(parameters, optimizer, 1)
    optimizer.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_hangs_ends_the_step(tmp_path, monkeypatch):
    parameters, optimizer = make(SIZES, torch.bfloat16, disk=paths(tmp_path, 1), window=2)
    step(parameters, optimizer, 0)
    optimizer._engine.drain()
    released, real = threading.Event(), blocks.read_at
    monkeypatch.setattr(blocks, "read_at", lambda *given: released.wait(60) and real(*given))
    optimizer._engine.store.states.disk.watch.patience = 0.2
    with pytest.raises(RunStopped, match=r"has not ended in 0 s, with .* under way: the disk hangs"):
        step(parameters, optimizer, 1)
    optimizer.close()
    released.set()
