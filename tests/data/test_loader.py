from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.batch import IGNORED, collate
from headrace.data.formats import Document
from headrace.data.loader import Loader
from headrace.data.packing import one_each, pack
from headrace.data.sources import Record
from headrace.data.store import Documents, write
from headrace.data.tally import Tally
from headrace.memory.shapes import round_length

RECORD = Record("a.jsonl:1", {}, 1)
CONTEXT = 24


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents whose tokens are all different, so that each can be followed."""
    random = np.random.default_rng(0)
    borders = np.cumsum([0, *random.integers(1, CONTEXT + 1, 60)])
    made = [
        Document(RECORD, np.arange(a, b, dtype=np.int32), random.random(b - a) < 0.6)
        for a, b in pairwise(borders.tolist())
    ]
    home = tmp_path_factory.mktemp("data") / "key"
    write(home, made, Tally())
    return Documents(home)


def loader(documents, *, packing=True, batch=5, micro_batch=2, seed=0):
    rows = pack(documents.lengths, CONTEXT, seed) if packing else one_each(len(documents))
    return Loader(documents, rows, batch=batch, micro_batch=micro_batch, seed=seed)


def taken_apart(batch):
    """Of each document its ids, labels and positions, by first id; what is outside documents is padding."""
    outside = torch.ones_like(batch.input_ids_BL, dtype=torch.bool)
    found = {}
    for row, start, stop in batch.documents:
        outside[row, start:stop] = False
        parts = (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL)
        ids, labels, positions = (part[row, start:stop].tolist() for part in parts)
        assert positions == list(range(stop - start)) and labels[-1] == IGNORED
        found[ids[0]] = (ids, labels)
    assert (batch.labels_BL[outside] == IGNORED).all() and (batch.position_ids_BL[outside] == 0).all()
    assert batch.valid_tokens == int((batch.labels_BL != IGNORED).sum())
    return found


def epoch(given, index=0):
    steps = range(index * given.steps_per_epoch, (index + 1) * given.steps_per_epoch)
    return [batch for step in steps for batch in given.step(step)]


def equal(a, b):
    tensors = ("input_ids_BL", "labels_BL", "position_ids_BL")
    return a.documents == b.documents and all(torch.equal(getattr(a, n), getattr(b, n)) for n in tensors)


def test_collate():
    row = [
        (np.array([5, 6, 7], np.int32), np.array([True, False, True])),
        (np.array([8], np.int32), np.array([True])),
    ]
    batch = collate([row, row[1:]], limit=4)
    assert batch.input_ids_BL.tolist() == [[5, 6, 7, 8], [8, 0, 0, 0]]
    assert batch.labels_BL.tolist() == [[-100, 7, -100, -100], [-100] * 4]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]
    assert batch.documents == ((0, 0, 3), (0, 3, 4), (1, 0, 1)) and batch.valid_tokens == 1
    assert {t.dtype for t in (batch.input_ids_BL, batch.labels_BL, batch.position_ids_BL)} == {torch.int64}


def test_packed_documents_are_the_unpacked_ones(documents):
    packed, single = loader(documents), loader(documents, packing=False)
    apart = [
        {k: v for batch in epoch(each) for k, v in taken_apart(batch).items()} for each in (packed, single)
    ]
    assert apart[0] == apart[1] and len(apart[0]) == len(documents)
    for indices in ([index] for index in range(len(documents))):
        ((ids, trained),) = documents.fetch(indices)
        labels = [*np.where(trained[1:], ids[1:], IGNORED).tolist(), IGNORED]
        assert apart[0][int(ids[0])] == (ids.tolist(), labels)
    for each in (packed, single):
        assert sum(batch.valid_tokens for batch in epoch(each)) == each.trained_tokens
        assert each.tokens == documents.lengths.sum() and each.documents == len(documents)
        assert max(batch.input_ids_BL.shape[1] for batch in epoch(each)) == each.longest_row <= CONTEXT


@pytest.mark.parametrize("packing", [True, False])
def test_every_epoch_has_every_document_once_in_another_order(documents, packing):
    given = loader(documents, packing=packing)
    orders = []
    for number in range(3):
        ids = [first for batch in epoch(given, number) for first in taken_apart(batch)]
        assert len(ids) == len(documents) == len(set(ids))
        orders.append(ids)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    other = loader(documents, packing=packing, seed=1)
    assert [first for batch in epoch(other) for first in taken_apart(batch)] != orders[0]


def test_sizes_of_steps_and_of_the_last(documents):
    given = loader(documents, packing=False, batch=16, micro_batch=3)
    assert given.steps_per_epoch == 4 and given.rows == 60
    sizes = [[len(batch.input_ids_BL) for batch in given.step(step)] for step in range(4)]
    assert sizes == [[3, 3, 3, 3, 3, 1]] * 3 + [[3, 3, 3, 3]]
    for batch in given.step(0):
        longest = max(stop - start for _, start, stop in batch.documents)
        assert batch.input_ids_BL.shape[1] == min(round_length(longest), given.longest_row)


def test_order_does_not_depend_on_the_micro_batch(documents):
    rows = [
        [first for batch in loader(documents, micro_batch=size).step(3) for first in taken_apart(batch)]
        for size in (1, 2, 5)
    ]
    assert rows[0] == rows[1] == rows[2]


@settings(max_examples=20, deadline=None)
@given(stops=st.lists(st.integers(0, 30), max_size=4), packing=st.booleans())
def test_any_number_of_resumes_continues_exactly(documents, stops, packing):
    whole = loader(documents, packing=packing)
    expected = [whole.step(index) for index in range(30)]
    index = 0
    for stop in [*sorted(stops), 30]:
        resumed = loader(documents, packing=packing)
        for index in range(index, stop):  # noqa: B020
            step = resumed.step(index)
            assert len(step) == len(expected[index])
            assert all(equal(a, b) for a, b in zip(step, expected[index], strict=True))
        index = stop


def test_in_order(documents):
    given = loader(documents, packing=False, micro_batch=7)
    firsts = [first for batch in given.in_order() for first in taken_apart(batch)]
    assert firsts == sorted(firsts) and len(firsts) == 60
