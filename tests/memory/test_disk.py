"""Buffers on disk paths: what was written is read, whatever the split, and every fault is one sentence."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from headrace.errors import RunStopped, UserError
from headrace.ledger import Ledger
from headrace.machine.paths import UNIT, split
from headrace.memory import blocks
from headrace.memory.blocks import ALIGN, BLOCK, Watch
from headrace.memory.budget import Budget
from headrace.memory.disk import DiskPath, DiskStore
from headrace.memory.parts import Form, read_part, verify
from headrace.memory.pool import HostPool

STATES = {"master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
MIXED = {"weight": torch.bfloat16, "scale": torch.float32}


def memory(form, seed=None):
    """Tables in memory of whole blocks of the disk, of random bits or zeros."""
    pool, tables = HostPool(Budget("ram", None, Ledger(), "memory.host")), {}
    for number, (name, dtype) in enumerate(form.tables.items()):
        whole = -(-form.numel * dtype.itemsize // ALIGN) * ALIGN // dtype.itemsize
        table = pool.take(whole, dtype, "buffers", name)
        if seed is not None:
            draw = torch.Generator().manual_seed(seed + number)
            table[: form.numel].copy_(torch.randn(form.numel, generator=draw))
        tables[name] = table
    return tables


def store_on(*paths, limit=None, **options):
    places = [path if isinstance(path, DiskPath) else DiskPath(Path(path), speed=1.0) for path in paths]
    return DiskStore(places, Budget("disk", limit, Ledger(), "memory.disk"), **options)


def write(store, name, tables, workers=1):
    for index in range(len(store.paths)):
        if transfer := store.writing(name, index, tables):
            for worker in range(workers):
                transfer.write(worker, workers)
            store.written(name, index, transfer.finish())


def read(store, name, tables, workers=1):
    for index in range(len(store.paths)):
        if transfer := store.reading(name, index, tables):
            for worker in range(workers):
                transfer.read(worker, workers)
            transfer.close()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


speeds = st.lists(st.floats(0.01, 10), min_size=1, max_size=4)


@given(st.integers(0, 50 * UNIT), speeds, st.integers(0, 1000))
def test_a_split_is_whole_and_in_proportion(numel, given_speeds, index):
    parts = split(numel, given_speeds, index)
    assert [low for low, _ in parts] == [0, *[high for _, high in parts[:-1]]]
    assert parts[-1][1] == numel
    for (low, high), speed in zip(parts, given_speeds, strict=True):
        assert low % UNIT == 0 or low == numel
        assert abs((high - low) - numel * speed / sum(given_speeds)) <= 2 * UNIT


@given(st.integers(1, 4), speeds)
def test_many_small_buffers_are_in_proportion_together(units, given_speeds):
    count = 1000
    sums = [0] * len(given_speeds)
    for index in range(count):
        for path, (low, high) in enumerate(split(units * UNIT, given_speeds, index)):
            sums[path] += high - low
    for found, speed in zip(sums, given_speeds, strict=True):
        assert abs(found / (count * units * UNIT) - speed / sum(given_speeds)) < 0.01


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 3 * UNIT + 5),
    st.sampled_from([STATES, MIXED]),
    st.lists(speeds.filter(lambda s: len(s) == 3), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_what_was_written_is_read_while_speeds_change(tmp_path_factory, numel, tables, rounds, workers):
    home = tmp_path_factory.mktemp("disk")
    form = Form(tables, numel)
    store = store_on(*(home / str(number) for number in range(3)))
    store.declare("b0", form)
    for seed, now in enumerate(rounds):
        store.speeds.shares = [speed / sum(now) for speed in now]
        held, back = memory(form, seed), memory(form)
        write(store, "b0", held, workers)
        read(store, "b0", back, workers)
        assert same(held, back)
    store.close()
    assert [file for path in home.iterdir() for file in path.iterdir() if "safetensors" in file.name] == []


def test_several_blocks_and_the_format(tmp_path):
    """More than a block a table; each file is one that the safetensors library reads."""
    form = Form(STATES, BLOCK // 4 * 2 + 7, {"segments": "[]"})
    store = store_on(tmp_path / "a", DiskPath(tmp_path / "b", speed=2.0))
    store.declare("b7", form)
    held = memory(form, seed=1)
    write(store, "b7", held, workers=2)
    files = store.link("b7", (tmp_path / "checkpoint").mkdir() or tmp_path / "checkpoint")
    assert [file.name for file in files] == ["b7.p0.safetensors", "b7.p1.safetensors"]
    for file in files:
        part, header = read_part(file)
        assert header % ALIGN == 0 and file.stat().st_size % ALIGN == 0
        assert part.form == form
        verify(file, Watch())
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor[: part.high - part.low], held[name][part.low : part.high])
    store.close()
    assert all(file.exists() for file in files), "a checkpoint outlives the store"


def test_a_checkpoint_is_a_link_that_no_later_write_touches(tmp_path):
    form = Form(STATES, 3 * UNIT)
    store, kept = store_on(tmp_path / "disk"), tmp_path / "checkpoint"
    kept.mkdir()
    store.declare("b0", form)
    first, second, back = memory(form, seed=1), memory(form, seed=2), memory(form)
    write(store, "b0", first)
    live = tmp_path / "disk" / "headrace-r0-b0.safetensors"
    (link,) = store.link("b0", kept)
    assert link.stat().st_ino == live.stat().st_ino, "no copy"
    write(store, "b0", second)
    assert link.stat().st_ino != live.stat().st_ino
    verify(link, Watch())
    inode = live.stat().st_ino
    write(store, "b0", second)
    assert live.stat().st_ino == inode, "in place while nobody else has it"
    read(store, "b0", back)
    assert same(back, second)
    store.adopt("b0", 0, link)
    read(store, "b0", back)
    assert same(back, first)
    write(store, "b0", second)
    verify(link, Watch())
    store.close()


def test_where_links_do_not_work_files_are_copied_and_it_is_said_once(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    form, kept = Form(STATES, 3 * UNIT), tmp_path / "run" / "checkpoint"
    store = store_on(tmp_path / "disk")
    kept.mkdir(parents=True)
    for name in ("b0", "b1"):
        store.declare(name, form)
        write(store, name, memory(form, seed=1))
    with pytest.warns(UserWarning, match=r"run cannot link to files in .*disk .*states are copied") as said:
        files = [file for name in ("b0", "b1") for file in store.link(name, kept)]
    write(store, "b0", memory(form, seed=2))
    assert len(said) == 1 and [verify(file, Watch()) for file in files] == [None, None]
    store.close()


def test_space_is_claimed_and_claimed_again(tmp_path):
    form = Form(STATES, 4 * UNIT)
    store, kept = store_on(tmp_path / "disk", limit=2**30), tmp_path / "checkpoint"
    kept.mkdir()
    for name in ("b0", "b1"):
        store.declare(name, form)
    store.reserve(2, "states", "the states")

    def taken():
        files = [*(tmp_path / "disk").iterdir(), *kept.iterdir()]
        return sum({s.st_ino: s.st_blocks * 512 for s in map(Path.stat, files)}.values())

    whole = taken()
    assert whole >= 2 * 2 * form.nbytes
    for seed in range(2):
        for name in ("b0", "b1"):
            write(store, name, memory(form, seed))
        store.top_up([kept])
        assert abs(taken() - whole) < 2**16
        if not seed:
            for name in ("b0", "b1"):
                store.link(name, kept)
    for file in kept.iterdir():
        file.unlink()
    store.top_up([kept])
    assert abs(taken() - whole) < 2**16
    store.close()


def test_too_little_room_is_refused_before_anything_is_written(tmp_path):
    form = Form(STATES, 4 * UNIT)
    store = store_on(tmp_path, limit=2**20)
    store.declare("b0", form)
    with pytest.raises(UserError, match=r"the states needs .*memory\.disk to at least"):
        store.reserve(1, "states", "the states")
    store.close()
    small = store_on(tmp_path / "a", DiskPath(tmp_path / "b", size=2**20))
    small.declare("b0", form)
    with pytest.raises(UserError, match=r"in .*/b, where memory\.disk allows 1MiB: raise it to at least"):
        small.reserve(1, "states", "the states")
    small.close()
    whole = store_on(tmp_path)
    whole.declare("b0", Form(STATES, 2**36))
    with pytest.raises(UserError, match=r"are free: make room, or name another path in memory\.disk"):
        whole.reserve(1, "states", "the states")
    whole.close()


# -- faults


@pytest.fixture
def written(tmp_path):
    """A store with one written buffer, and a checkpoint of it."""
    form = Form(STATES, 3 * UNIT)
    store = store_on(tmp_path / "disk")
    store.declare("b0", form)
    write(store, "b0", memory(form, seed=1))
    (tmp_path / "kept").mkdir()
    (link,) = store.link("b0", tmp_path / "kept")
    yield store, form, link
    verify(link, Watch())
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails(written, monkeypatch, number):
    store, form, _ = written

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(blocks, "write_at", fail)
    advice = "make room" if number == errno.ENOSPC else "look at the disk"
    message = f"cannot be written \\({os.strerror(number)}\\): {advice}, then go on from the last checkpoint"
    with pytest.raises(RunStopped, match=message):
        write(store, "b0", memory(form, seed=2))


def test_a_read_that_fails(written, monkeypatch):
    store, form, _ = written

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(blocks, "read_at", fail)
    with pytest.raises(RunStopped, match=r"cannot be read \(Input/output error\): look at the disk"):
        read(store, "b0", memory(form))


def test_writes_and_reads_in_pieces_are_put_together(written, monkeypatch):
    store, form, _ = written
    whole_write, whole_read = blocks.write_at, blocks.read_at
    monkeypatch.setattr(blocks, "write_at", lambda fd, m, at: whole_write(fd, m[:ALIGN], at))
    monkeypatch.setattr(blocks, "read_at", lambda fd, m, at: whole_read(fd, m[:ALIGN], at))
    held, back = memory(form, seed=3), memory(form)
    write(store, "b0", held)
    read(store, "b0", back)
    assert same(held, back)


@pytest.mark.parametrize("nbytes", [ALIGN, 1])
def test_a_file_that_was_shortened(written, nbytes):
    store, form, link = written
    write(store, "b0", memory(form, seed=2))  # apart from the checkpoint
    (file,) = link.parent.parent.glob("disk/*.safetensors")
    os.truncate(file, file.stat().st_size - nbytes)
    with pytest.raises(RunStopped, match=r"ends at byte .*something shortened it"):
        read(store, "b0", memory(form))


def test_a_byte_that_changed(written):
    store, form, link = written
    write(store, "b0", memory(form, seed=2))
    (file,) = link.parent.parent.glob("disk/*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(3 * ALIGN + 5)
        byte = opened.read(1)
        opened.seek(3 * ALIGN + 5)
        opened.write(bytes([byte[0] ^ 1]))
    with pytest.raises(RunStopped, match=r"has other bytes at .* than were written there"):
        read(store, "b0", memory(form))
    with pytest.raises(RunStopped, match="has other bytes at"):
        verify(file, Watch())


def test_a_directory_that_vanished(written):
    store, form, link = written
    for file in (link.parent.parent / "disk").iterdir():
        file.unlink()
    with pytest.raises(RunStopped, match=r"cannot be read .*No such file"):
        read(store, "b0", memory(form))


def test_a_disk_that_hangs_is_found_by_the_watch(tmp_path, monkeypatch):
    released, form = threading.Event(), Form(STATES, UNIT)
    store = store_on(tmp_path, watch=Watch(patience=0.05))
    store.declare("b0", form)
    monkeypatch.setattr(blocks, "write_at", lambda fd, m, at: released.wait() and os.pwritev(fd, [m], at))
    thread = threading.Thread(target=write, args=(store, "b0", memory(form, seed=1)))
    thread.start()
    time.sleep(0.2)
    try:
        with pytest.raises(RunStopped, match=r"writing [\d,]+ bytes of .*b0.*1 reads and writes under way"):
            store.watch.check()
    finally:
        released.set()
        thread.join()
    store.watch.check()
    store.close()


HOLD = """
import sys, time
from pathlib import Path
from headrace.ledger import Ledger
from headrace.memory.budget import Budget
from headrace.memory.disk import DiskPath, DiskStore
budget = Budget("disk", None, Ledger(), "memory.disk")
store = DiskStore([DiskPath(Path(sys.argv[1]))], budget, int(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_on_a_path_is_refused_and_a_killed_one_leaves_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "0"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} .* choose another memory.disk"):
            store_on(tmp_path)
        store_on(tmp_path, rank=1).close()
    finally:
        holder.kill()
        holder.wait()
    (tmp_path / "headrace-r0-b0.safetensors").write_bytes(b"torn")
    (tmp_path / "headrace-r1-b0.safetensors").write_bytes(b"another rank's")
    (tmp_path / "mine.txt").write_text("not a run's")
    store_on(tmp_path).close()
    left = {file.name for file in tmp_path.iterdir() if not file.name.startswith(".")}
    assert left == {"headrace-r1-b0.safetensors", "mine.txt"}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_path_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot be written to"):
            store_on(tmp_path)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("place", ["/proc/below", "file/below"])
def test_a_path_that_cannot_be_made_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"memory\.disk=.*cannot be written to"):
        store_on(tmp_path / place)


def test_without_direct_io_it_says_so_once(tmp_path, monkeypatch, recwarn):
    real = os.open

    def refuse(path, flags, mode=0o777, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", refuse)
    form = Form(STATES, UNIT + 3)
    store = store_on(tmp_path)
    store.declare("b0", form)
    held, back = memory(form, seed=1), memory(form)
    for _ in range(2):
        write(store, "b0", held)
    read(store, "b0", back)
    assert same(held, back)
    assert [str(w.message) for w in recwarn].count(
        f"{tmp_path} knows no direct I/O: its reads and writes go through the system's caches"
    ) == 1
    store.close()
