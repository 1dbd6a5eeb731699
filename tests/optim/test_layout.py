from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.optim.kernel import blocks_of, share
from headrace.schedule.layout import ALIGN, BLOCK, Parameter, cut

parameters = st.lists(
    st.builds(
        Parameter,
        name=st.just("p"),
        numel=st.one_of(st.integers(0, 100), st.integers(0, 5 * BLOCK)),
        group=st.integers(0, 1),
        dtype=st.sampled_from(["bf16", "fp32"]),
    ),
    max_size=12,
)
capacities = st.integers(1, 4).map(lambda n: n * BLOCK)


@given(parameters, capacities)
def test_every_element_is_in_one_place(params, capacity):
    layout = cut(params, capacity)
    for index, parameter in enumerate(params):
        spans = [(s.start, s.stop) for _, s in layout.places(index)]
        assert [start for start, _ in spans] == [0, *[stop for _, stop in spans]][: len(spans)]
        assert (spans[-1][1] if spans else 0) == parameter.numel


@given(parameters, capacities)
def test_buckets_keep_their_bounds(params, capacity):
    for bucket in cut(params, capacity).buckets:
        assert 0 < bucket.size <= capacity
        end = 0
        for s in bucket.segments:
            assert s.offset >= end and s.offset % ALIGN == 0
            assert s.start % BLOCK == 0
            assert (params[s.parameter].group, params[s.parameter].dtype) == (bucket.group, bucket.dtype)
            end = s.end
        assert bucket.size == -(-end // ALIGN) * ALIGN


@given(parameters, capacities)
def test_last_parameters_come_first(params, capacity):
    layout = cut(params, capacity)
    for group in (0, 1):
        for dtype in ("bf16", "fp32"):
            order = [
                s.parameter
                for b in layout.buckets
                if (b.group, b.dtype) == (group, dtype)
                for s in b.segments
            ]
            assert order == sorted(order, reverse=True)


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_shares_cover_a_bucket_at_multiples_of_16(size, workers):
    spans = [share(size, worker, workers) for worker in range(workers)]
    assert spans[0][0] == 0 and spans[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert all(low % ALIGN == 0 for low, _ in spans if low < size)


@given(parameters, capacities)
def test_blocks_do_not_depend_on_the_cut(params, capacity):
    def blocks(size):
        found = [
            (b.parameter, b.start, b.stop)
            for k in cut(params, size).buckets
            for s in k.segments
            for b in blocks_of(s)
        ]
        return sorted(found)

    assert blocks(capacity) == blocks(8 * BLOCK)
