"""What is fetched, held against an account of its own: what is used is there, and no slot is overrun."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule.action import Unit
from headrace.schedule.fetches import Passage, Shelf


def layers_of(count):
    return [Unit("l", index) for index in range(count)]


def use(shelf, unit, coming, content, fetched):
    """One use, as whoever executes it does; ``content`` is what slots hold by its own account."""
    for fetch in shelf.wanted(coming):
        holder = next((u for u, slot in content.items() if slot == fetch.slot), None)
        assert holder != unit or fetch.unit == unit
        if holder is not None:
            del content[holder]
        content[fetch.unit] = fetch.slot
        fetched[fetch.unit] += 1
    assert content[unit] == shelf.slot(unit)
    assert len(content) <= shelf.slots
    shelf.use(unit)


def train(passage, shelf, units, microbatches, content):
    fetched = Counter()
    for _ in range(microbatches):
        for unit in units:
            use(shelf, unit, passage.layer(unit, True), content, fetched)
            shelf.release(unit)
        for before, unit in zip([None, *reversed(units)], reversed(units), strict=False):
            if before is not None:
                shelf.release(before)
            use(shelf, unit, passage.backward(unit), content, fetched)
        shelf.release(units[0])
    return fetched


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_a_step_fetches_what_the_formula_says(count, slots, microbatches):
    """Cold: n for the first forward; every turn of direction saves as many as there are slots."""
    units, s = layers_of(count), min(slots, count)
    passage, shelf = Passage(None, units, None), Shelf(units, slots)
    content = {}
    fetched = train(passage, shelf, units, microbatches, content)
    assert fetched.total() == count + (2 * microbatches - 1) * (count - s)
    shelf.clear()
    assert train(passage, shelf, units, 1, {}).total() == count + count - s


@given(st.integers(1, 9), st.integers(2, 5))
def test_one_is_fetched_while_the_one_before_is_used(count, slots):
    units = layers_of(count)
    passage, shelf = Passage(None, units, None), Shelf(units, slots)
    for unit in units:
        coming = passage.layer(unit, True)
        list(shelf.wanted(coming))
        shelf.use(unit)
        assert all(shelf.slot(u) is not None for u in coming[1 : shelf.slots] if u not in coming[:1])
        shelf.release(unit)


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_any_order_of_uses_finds_what_it_needs(data, count, slots):
    units = layers_of(count)
    passage, shelf, content, fetched = Passage(None, units, None), Shelf(units, slots), {}, Counter()
    for unit in data.draw(st.lists(st.sampled_from(units), max_size=20)):
        backward = data.draw(st.booleans())
        coming = passage.backward(unit) if backward else passage.layer(unit, data.draw(st.booleans()))
        use(shelf, unit, coming, content, fetched)
        shelf.release(unit)


def test_an_embedding_is_asked_for_at_both_ends():
    units, embedding = layers_of(3), Unit("e", 0)
    tied = Passage(embedding, units, embedding)
    assert tied.first(True) == [embedding, *units, embedding, *reversed(units)]
    assert tied.last(True) == [embedding, *reversed(units)]
    assert tied.last(False) == [embedding]
    shelf, fetched = Shelf([embedding], 1), Counter()
    for coming in (tied.first(True), tied.layer(units[1], True), tied.last(True)):
        fetched.update(fetch.unit for fetch in shelf.wanted(coming))
    assert fetched == {embedding: 1}
