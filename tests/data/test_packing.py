import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.packing import Purpose, one_each, pack, permutation

cases = st.integers(2, 200).flatmap(
    lambda context: st.tuples(st.just(context), st.lists(st.integers(1, context), max_size=120))
)


@given(cases, st.integers(0, 5))
def test_every_document_once_and_no_row_over_context(case, seed):
    context, lengths = case[0], np.asarray(case[1], dtype=np.int64)
    rows = pack(lengths, context, seed)
    assert sorted(rows.documents.tolist()) == list(range(len(lengths)))
    sums = [int(lengths[rows[r]].sum()) for r in range(len(rows))]
    assert all(0 < total <= context for total in sums) and sum(sums) == lengths.sum()
    again = pack(lengths, context, seed)
    assert np.array_equal(rows.documents, again.documents) and np.array_equal(rows.starts, again.starts)


@given(cases)
def test_each_document_goes_where_the_least_space_is_left(case):
    """The rule of best fit, followed naively."""
    context, lengths = case[0], np.asarray(case[1], dtype=np.int64)
    space: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [free for free in space if free >= length]
        if fitting:
            space.remove(min(fitting))
        space.append((min(fitting) if fitting else context) - length)
    rows = pack(lengths, context, seed=0)
    assert sorted(context - int(lengths[rows[r]].sum()) for r in range(len(rows))) == sorted(space)


def test_seed_decides_among_equals():
    lengths = np.full(50, 10)
    first, second = pack(lengths, 40, 0), pack(lengths, 40, 1)
    assert len(first) == len(second) == 13
    assert not np.array_equal(first.documents, second.documents)


def test_packing_wastes_little():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64) + 1, 2048)
    rows = pack(lengths, 2048, 0)
    assert lengths.sum() / (len(rows) * 2048) > 0.99


def test_one_each():
    rows = one_each(3)
    assert [rows[r].tolist() for r in range(len(rows))] == [[0], [1], [2]]


def test_permutation_is_the_same_everywhere():
    assert permutation(8, Purpose.SHUFFLE, 5, 7).tolist() == [5, 6, 7, 1, 3, 2, 4, 0]
    assert sorted(permutation(1000, Purpose.SPLIT, 7).tolist()) == list(range(1000))


@pytest.mark.parametrize("other", [(Purpose.SHUFFLE, 1, 0), (Purpose.SHUFFLE, 0, 1), (Purpose.SPLIT, 0, 0)])
def test_purpose_seed_and_epoch_all_count(other):
    assert not np.array_equal(permutation(100, Purpose.SHUFFLE, 0, 0), permutation(100, *other))
