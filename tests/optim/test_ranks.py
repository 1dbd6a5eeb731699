"""Ranks that share an optimizer end with the bits of one process; every update is made once."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW
from headrace.optim.ranks import owners

sys.path.insert(0, str(Path(__file__).parent))
import ranked

OPTIONS = {"paths": 0, "window": 4, "micro_batches": 1, "released": True}


def spawn(processes, target, ranks, tmp_path, *arguments):
    """Run a function on every rank; returns what each saved."""
    result = tmp_path / "result"
    running = [
        processes.Process(
            target=target,
            args=(rank, ranks, str(tmp_path / "rendezvous"), str(tmp_path), *arguments, str(result)),
        )
        for rank in range(ranks)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(ranked.TIMEOUT)
    assert [process.exitcode for process in running] == [0] * ranks
    return [torch.load(f"{result}.{rank}") for rank in range(ranks)]


def assert_same(found, expected):
    weights, states, norm = found
    assert norm == expected[2]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected[0], strict=True))
    assert states.keys() == expected[1].keys()
    for position, tables in states.items():
        for name, table in tables.items():
            assert torch.equal(table, expected[1][position][name]), (position, name)


@given(st.lists(st.integers(1, 10**6), max_size=30), st.integers(1, 8))
def test_buckets_are_shared_evenly(sizes, ranks):
    found = owners(sizes, ranks)
    held = [
        sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(ranks)
    ]
    assert len(found) == len(sizes) and set(found) <= set(range(ranks))
    assert max(held) - min(held) <= max(sizes, default=0)


def test_two_ranks_in_memory(processes, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ranked.lone(3, tmp_path, 4, OPTIONS)
    found = spawn(processes, ranked.run, 2, tmp_path, 3, 4, OPTIONS)
    for outcome, _ in found:
        assert_same(outcome, expected)
    whole = sum(12 * -(-torch.Size(shape).numel() // 16) * 16 for shape in ranked.shapes(3))
    assert sum(held for _, held in found) == whole, "each state is held once"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"paths": 0, "released": False},
        {"paths": 0, "micro_batches": 2},
        {"paths": 1},
        {"paths": 1, "window": 1, "released": False},
        {"paths": 3, "micro_batches": 2},
        {"paths": 3, "gradients": "disk", "micro_batches": 2},
        {"paths": 1, "dtype": torch.float32},
    ],
    ids=str,
)
def test_any_number_of_ranks(processes, tmp_path, ranks, options):
    options = {**OPTIONS, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ranked.lone(ranks, tmp_path, 5, options)
    for outcome, _ in spawn(processes, ranked.run, ranks, tmp_path, ranks, 5, options):
        assert_same(outcome, expected)
    assert not [path for path in tmp_path.glob("d*/*") if path.is_file()], "files are left"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_saved_states_are_gone_on_from(processes, tmp_path, ranks):
    options = {**OPTIONS, "paths": 2, "window": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ranked.lone(5, tmp_path, 5, options)
    found = spawn(processes, ranked.run_again, ranks, tmp_path, 5, options)
    for outcome, _ in found:
        assert_same(outcome, expected)
    assert sum(files for _, files in found) == len(list((tmp_path / "kept").iterdir()))


def test_one_process_at_a_time_has_its_turn(processes, tmp_path):
    marks, path = tmp_path / "marks", tmp_path / "turn"
    running = [
        processes.Process(target=ranked.hold_turns, args=(str(path), str(marks), 20)) for _ in range(3)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(ranked.TIMEOUT)
    lines = [line.split() for line in marks.read_text().splitlines()]
    assert len(lines) == 2 * 20 * 3
    for (word, process), (other, same) in zip(lines[::2], lines[1::2], strict=True):
        assert (word, other) == ("begin", "end") and process == same
    assert not path.exists()


def lone_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return dist.group.WORLD


def test_what_is_no_group_is_refused():
    with pytest.raises(UserError, match=r"group=3 must be a process group"):
        OffloadedAdamW([torch.nn.Parameter(torch.ones(3))], group=3)


def test_a_group_of_one_is_as_none(tmp_path):
    group = lone_group(tmp_path)
    try:
        optimizer = ranked.build(4, tmp_path, group, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ranked.train(optimizer, 4, 4, 1)
            expected = ranked.lone(4, tmp_path, 4, OPTIONS)
        assert_same(ranked.outcome(optimizer), expected)
        optimizer.close()
    finally:
        dist.destroy_process_group()
