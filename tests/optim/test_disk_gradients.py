"""Gradients that wait on the disk give the bits of gradients in memory, and move the bytes of the method."""

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RunStopped, UserError
from headrace.memory import blocks
from headrace.memory.disk import DiskPath
from headrace.optim.engine import IN_FLIGHT
from headrace.optim.offloaded import OffloadedAdamW, SkippedStep
from headrace.schedule.action import Kind
from headrace.schedule.layout import BLOCK
from headrace.schedule.window import BUFFERS

BF16, FP32 = torch.bfloat16, torch.float32


def make(sizes, dtype, **options):
    """Parameters of the given shapes, of one dtype or of one each, and their optimizer."""
    torch.manual_seed(0)
    dtypes = dtype if isinstance(dtype, list) else [dtype] * len(sizes)
    parameters = [torch.nn.Parameter(torch.randn(s).to(d)) for s, d in zip(sizes, dtypes, strict=True)]
    settings = {"lr": 1e-2, "bucket": BLOCK, "workers": 2, "release_gradients": True}
    return parameters, OffloadedAdamW(parameters, **settings | options)


def on_disk(home, count, **options):
    """Unequal paths."""
    paths = [DiskPath(Path(home) / str(number), speed=1.0 + number) for number in range(count)]
    return {"disk": paths, "gradients": "disk", **options}


def backward(parameters, seed, absent=(), bad=False):
    """One micro-batch, in which some parameters take no part."""
    draw = torch.Generator().manual_seed(seed)
    factors = [torch.randn(p.shape, generator=draw).to(p.dtype) for p in parameters]
    present = [index for index in range(len(parameters)) if index not in absent]
    if bad and present:
        factors[present[0]].view(-1)[-1] = float("inf")
    if present:
        sum((parameters[i] * factors[i]).float().sum() for i in present).backward()
    return bool(bad and present)


def same(ours, theirs):
    """Weights, norms, counts, and every table of every parameter."""
    (left, a), (right, b) = ours, theirs
    weights = all(torch.equal(x, y) for x, y in zip(left, right, strict=True))
    places = [(table, name) for table in a.tables for name in a.names]
    tables = [(torch.cat(a.pieces(*place)), torch.cat(b.pieces(*place))) for place in places]
    return weights and a.counts == b.counts and all(torch.equal(x, y) for x, y in tables)


def moved(optimizer, kind):
    """Lane -> bytes and times that gradients were read or written."""
    found = {}
    for action, account in optimizer.ledger.actions.items():
        if action.kind is kind and action.unit.kind == "g":
            nbytes, count = found.get(action.lane, (0, 0))
            found[action.lane] = nbytes + account.nbytes, count + account.count
    return found


SIZES = st.sampled_from(
    [
        [(3 * BLOCK + 5,), (100, 700), (BLOCK,), (17,), (2 * BLOCK, 2)],
        [(BLOCK,)] * 5,
        [(16,), (5 * BLOCK + 16,), (1,), (3, 5), (2 * BLOCK - 16,)],
    ]
)
ABSENT = st.sets(st.integers(0, 4), max_size=5)
STEPS = st.lists(
    st.tuples(st.lists(ABSENT, max_size=3), st.sampled_from(["good", "good", "good", "bad", "dropped"])),
    min_size=1,
    max_size=5,
)


def take(pair, number, absences, fate):
    """One step of up to ``micro_batches`` backward passes; returns the norm."""
    parameters, optimizer = pair
    absences = absences[: optimizer.micro_batches]
    if fate == "dropped":
        for index, absent in enumerate(absences):
            backward(parameters, 50 + 100 * number + index, absent)
        optimizer.zero_grad()
    bad = False
    for index, absent in enumerate(absences):
        bad |= backward(parameters, 100 * number + index, absent, bad=fate == "bad" and not index)
    if bad:
        with pytest.warns(SkippedStep):
            optimizer.step()
    else:
        optimizer.step()
    return optimizer.norm


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
@settings(deadline=None, max_examples=30)
@given(
    SIZES,
    st.sampled_from([BF16, FP32, [BF16, FP32, torch.float16, BF16, FP32]]),
    st.integers(1, 3),
    st.integers(1, 14),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.0]),
    STEPS,
)
def test_bits_are_those_of_gradients_in_memory(
    tmp_path_factory, sizes, dtype, count, window, bucket, micro_batches, limit, script
):
    """With parameters left out, short steps, skipped steps, and gradients thrown away in mid-step."""
    home = tmp_path_factory.mktemp("disk")
    options = {"bucket": bucket * BLOCK, "micro_batches": micro_batches, "max_grad_norm": limit}
    in_memory = make(sizes, dtype, **options)
    disk = make(sizes, dtype, window=window, **on_disk(home, count), **options)
    for number, (absences, fate) in enumerate(script):
        norms = [take(pair, number, absences, fate) for pair in (in_memory, disk)]
        assert str(norms[0]) == str(norms[1])  # nan is not equal to itself
    assert same(disk, in_memory)
    for _, optimizer in (in_memory, disk):
        optimizer.close()
    assert not list(home.iterdir()), "files are left"


def test_gradients_that_stay_in_place_too(tmp_path):
    sizes, options = [(3 * BLOCK + 5,), (100, 700), (17,)], {"release_gradients": False}
    in_memory, disk = make(sizes, BF16, **options), make(sizes, BF16, **on_disk(tmp_path, 2), **options)
    for number in range(3):
        for parameters, optimizer in (in_memory, disk):
            backward(parameters, number)
            backward(parameters, 10 + number, absent=[1])
            optimizer.step()
            optimizer.zero_grad()
    assert same(disk, in_memory)


@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("script", [[1, 1, 1], [3, 3, 2], [2, 2], [3]])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_bytes_are_those_of_the_method(tmp_path, dtype, script, window):
    """As they come in one micro-batch, else 4 an element and micro-batch, written and read as often."""
    numel, micro_batches = 9 * BLOCK, max(script)
    options = on_disk(tmp_path, 2, window=window, micro_batches=micro_batches)
    parameters, optimizer = make([(numel,)], dtype, **options)
    for number, count in enumerate(script):
        for index in range(count):
            backward(parameters, 10 * number + index)
        optimizer.step()
    element = 4 if micro_batches > 1 else dtype.itemsize
    for kind in (Kind.READ, Kind.WRITE):
        lanes = moved(optimizer, kind)
        assert sum(nbytes for nbytes, _ in lanes.values()) == element * numel * sum(script)
        assert all(count == 9 * sum(script) for _, count in lanes.values())
    optimizer.close()


@pytest.mark.parametrize(("micro_batches", "element"), [(1, 2), (3, 4)])
def test_memory_is_a_few_buffers(tmp_path, micro_batches, element):
    def held(**options):
        _, optimizer = make([(9 * BLOCK + 5,)], BF16, micro_batches=micro_batches, **options)
        peaks = {tier: dict(purposes) for tier, purposes in optimizer.ledger.peaks.items()}
        optimizer.close()
        return peaks

    in_memory = held(disk=on_disk(tmp_path, 1)["disk"])
    disk = held(**on_disk(tmp_path, 1))
    assert disk["ram"].get("gradients", 0) == 0
    assert disk["ram"]["buffers"] - in_memory["ram"]["buffers"] == BUFFERS * BLOCK * element
    assert disk["disk"] == in_memory["disk"] | {"gradients": (9 * BLOCK + 16) * element}
    limit = sum(disk["ram"].values())
    held(**on_disk(tmp_path, 1, host=limit))
    with pytest.raises(UserError, match=r"raise memory\.host to at least"):
        held(**on_disk(tmp_path, 1, host=limit - 1))


def test_few_buckets_take_no_more_buffers_than_they_are(tmp_path):
    _, optimizer = make([(BLOCK,)], BF16, workers=1, **on_disk(tmp_path, 1))
    assert optimizer.ledger.peaks["ram"]["buffers"] == 2 * BLOCK + 2**15 * 4 + BLOCK * 8
    optimizer.close()


def test_backward_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """However slow the disk, no more than a few buckets of gradients are in memory; then backward waits."""
    parameters, optimizer = make([(BLOCK,)] * 12, BF16, **on_disk(tmp_path, 1))
    backward(parameters, 0)
    optimizer.step()
    optimizer._engine.drain()
    arrived, gate, real = [], threading.Event(), blocks.write_at
    monkeypatch.setattr(blocks, "write_at", lambda *given: gate.wait(60) and real(*given))
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index))

    thread = threading.Thread(target=backward, args=(parameters, 1))
    thread.start()
    while len(arrived) < BUFFERS + IN_FLIGHT:
        time.sleep(0.01)
    thread.join(0.5)
    assert thread.is_alive() and len(arrived) == BUFFERS + IN_FLIGHT
    gate.set()
    thread.join(60)
    assert not thread.is_alive() and len(arrived) == 12
    optimizer.step()
    optimizer.close()


def test_a_disk_that_fails_as_gradients_are_written_ends_backward(tmp_path, monkeypatch):
    parameters, optimizer = make([(BLOCK,)] * 12, BF16, **on_disk(tmp_path, 2))
    backward(parameters, 0)
    optimizer.step()
    optimizer._engine.drain()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "write_at", fail)
    with pytest.raises(RunStopped, match=r"gradients-b\d+.* cannot be written \(No space left on dev"):
        backward(parameters, 1)
        optimizer.step()
    optimizer.close()
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_disk_that_fails_as_gradients_are_read_ends_the_step(tmp_path, monkeypatch, micro_batches):
    parameters, optimizer = make(
        [(BLOCK,)] * 5, BF16, window=9, micro_batches=micro_batches, **on_disk(tmp_path, 1)
    )
    for number in range(micro_batches):
        backward(parameters, number)
    optimizer.step()

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(blocks, "read_at", fail)
    with pytest.raises(RunStopped, match=r"gradients-b\d+.* cannot be read \(Input/output error\)"):
        for number in range(micro_batches):
            backward(parameters, 10 + number)
        optimizer.step()
    optimizer.close()
    assert not list(tmp_path.iterdir())


def test_a_shortened_file_of_gradients_is_found(tmp_path):
    parameters, optimizer = make([(BLOCK,)] * 3, BF16, **on_disk(tmp_path, 1))
    backward(parameters, 0)
    optimizer._engine.drain()
    (file,) = tmp_path.glob("0/*gradients-b00001*")
    with file.open("r+b") as opened:
        opened.truncate(8192)
    with pytest.raises(RunStopped, match=r"gradients-b00001"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradients": "disk"}, r"gradients='disk' needs a place: pass disk="),
        ({"gradients": "ram"}, r"gradients='ram' must be 'host' or 'disk'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        make([(16,)], BF16, **options)
