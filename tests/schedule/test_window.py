"""The window against a plain account of what lies where."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule.window import AHEAD, Read, Update, Window, Write

scripts = st.lists(
    st.tuples(
        st.sets(st.integers(0, 11)) | st.sets(st.integers(4, 11), min_size=6),
        st.booleans(),
        st.sampled_from(["update", "skip"]),
    ),
    max_size=8,
)


@given(st.integers(1, 14), st.integers(1, 12), scripts)
def test_every_bucket_is_updated_from_its_newest_bytes(places, buckets, script):
    """Steps over any buckets, with or without reads ahead, skipped or not: memory and disk stay in line."""
    window = Window(places, buckets)
    memory, disk, truth = {}, dict.fromkeys(range(buckets), 0), dict.fromkeys(range(buckets), 0)
    for step, (chosen, ahead, end) in enumerate(script):
        order = window.ordered([bucket for bucket in chosen if bucket < buckets])
        moves = list(window.ahead(window.ordered(range(buckets)))) if ahead else []
        moves += window.step(order, step) if end == "update" else []
        updated = []
        for move in moves:
            match move:
                case Read(bucket, place, after):
                    assert all(there != bucket for there, _ in memory.values()), "it is in memory"
                    assert after is None or after[1] <= step
                    memory[place] = bucket, disk[bucket]
                case Update(bucket, place, _):
                    assert memory[place] == (bucket, truth[bucket]), "old bytes"
                    truth[bucket] += 1
                    memory[place] = bucket, truth[bucket]
                    updated.append(bucket)
                case Write(bucket, place):
                    assert memory[place][0] == bucket
                    disk[bucket] = memory.pop(place)[1]
        assert updated == (order if end == "update" else [])
        assert len(memory) <= window.places
        # A place that was dropped without a write keeps bytes that nobody asks for.
        memory = {place: held for place, held in memory.items() if window.place(held[0]) == place}
        for bucket in window.resident:
            assert memory[window.place(bucket)] == (bucket, truth[bucket])
            assert window.is_dirty(bucket) == (disk[bucket] != truth[bucket])
        assert all(disk[bucket] == truth[bucket] for bucket in truth if window.place(bucket) is None)


@given(st.integers(1, 14), st.integers(1, 12), st.booleans())
def test_of_n_buckets_n_minus_c_are_read_and_written(places, buckets, ahead):
    window = Window(places, buckets)
    assert window.kept == (buckets if places >= buckets else max(0, places - AHEAD))
    for step in range(5):
        order = window.ordered(range(buckets))
        assert order == sorted(range(buckets), reverse=step % 2 == 1)
        moves = list(window.ahead(order)) if ahead else []
        moves += window.step(order, step)
        reads, writes = (sum(isinstance(move, kind) for move in moves) for kind in (Read, Write))
        assert writes == buckets - window.kept
        assert reads == (buckets if step == 0 else buckets - window.kept)


@given(st.integers(1, 14), st.integers(1, 12))
def test_a_read_waits_for_the_write_of_what_lay_in_its_place(places, buckets):
    window, written = Window(places, buckets), {}
    for step in range(4):
        for move in window.step(window.ordered(range(buckets)), step):
            if isinstance(move, Write):
                written[move.place] = move.bucket, step
            elif isinstance(move, Read):
                assert move.after == written.pop(move.place, None)
