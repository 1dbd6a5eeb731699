"""The waits around gradients on the disk: no buffer and no file is touched by two who disagree."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.optim.policies.base import Emission
from headrace.optim.policies.sync import Sync
from headrace.optim.waiting import Waiting
from headrace.schedule.action import Action, Kind, StepShape, Wait, bucket, parse
from headrace.schedule.layout import Bucket

STEPS = st.lists(
    st.tuples(
        st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=3),  # buckets of each micro-batch
        st.sampled_from(["updated", "updated", "skipped", "dropped"]),
    ),
    max_size=5,
)


def bucket_of(index):
    return Bucket(index, 0, "bf16", (), 0)


class Order:
    """What happens before what, by waits and by the order of lanes."""

    def __init__(self):
        self.emissions = []
        self._before = []  # of each emission, all that ends before it starts
        self._events = {}
        self._lanes = {}
        self._boundary = set()

    def add(self, emission, step):
        number, action = len(self.emissions), emission.action
        keys = ((step - wait.steps_back, wait.action) for wait in emission.after)
        direct = {self._events[key] for key in keys if key in self._events}
        if action.lane in self._lanes:
            direct.add(self._lanes[action.lane])
        self.emissions.append((step, emission))
        self._before.append(set().union(self._boundary, direct, *(self._before[n] for n in direct)))
        self._lanes[action.lane] = self._events[step, action] = number

    def end_step(self):
        """Nothing that was due lasts into the next step."""
        self._boundary = set(range(len(self.emissions)))

    def holds(self, first, second):
        return first in self._before[second]

    def numbers(self, matches):
        return [number for number, (_, emission) in enumerate(self.emissions) if matches(emission)]


def run(script, buffers, paths):
    """The order of whole steps, with the tenants of each buffer one after the other."""
    policy, waiting, order = Sync(), Waiting(buffers, paths), Order()
    for step, (microbatches, fate) in enumerate(script):
        shape, seen = StepShape(3, 7), {}
        for touched in microbatches:
            for index in sorted(touched):
                seen[index] = seen.get(index, -1) + 1
                for emission in waiting.arriving(policy.gradient(seen[index], bucket_of(index), shape), step):
                    order.add(emission, step)
        emissions = policy.update([bucket_of(index) for index in sorted(seen)], shape)
        for emission in waiting.around(emissions, step) if fate != "dropped" else ():
            order.add(emission, step)
            if fate == "skipped" and emission.action.kind is Kind.CLIP:
                break
        order.end_step()
        waiting.next_step()
    return order


def tenants(order, buffer):
    """Actions in a buffer, a list for each time that it was given to a bucket."""
    found = []
    for number in order.numbers(lambda e: e.place.gradient == buffer):
        step, emission = order.emissions[number]
        action = emission.action
        key = step, action.unit.index, action.microbatch
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(number)
    return [numbers for _, numbers in found]


@given(STEPS, st.integers(1, 4), st.integers(1, 3))
def test_a_buffer_has_one_tenant_at_a_time(script, buffers, paths):
    order = run(script, buffers, paths)
    for buffer in range(buffers):
        for earlier, later in pairwise(tenants(order, buffer)):
            assert all(order.holds(first, second) for first in earlier for second in later)


@given(STEPS, st.integers(1, 4), st.integers(1, 3))
def test_who_reads_waits_for_what_was_written_and_who_works_for_what_was_read(script, buffers, paths):
    order = run(script, buffers, paths)
    for buffer in range(buffers):
        for numbers in tenants(order, buffer):
            kinds = {number: order.emissions[number][1].action.kind for number in numbers}
            reads = [n for n, kind in kinds.items() if kind is Kind.READ]
            works = [n for n, kind in kinds.items() if kind in (Kind.DOWN, Kind.UPDATE)]
            others = [n for n, kind in kinds.items() if kind in (Kind.NORM, Kind.WRITE, Kind.UP)]
            assert len(works) == 1 and len(reads) in (0, paths)
            assert all(order.holds(read, works[0]) for read in reads)
            assert all(order.holds(works[0], other) for other in others)


@given(STEPS, st.integers(1, 4), st.integers(1, 3))
def test_a_file_is_written_and_read_in_turn(script, buffers, paths):
    order = run(script, buffers, paths)
    for index in range(7):
        for path in range(paths):
            unit = ("g", index)
            moves = order.numbers(
                lambda e, path=path, unit=unit: (
                    e.action.path == path and (e.action.unit.kind, e.action.unit.index) == unit
                )
            )
            assert all(order.holds(first, second) for first, second in pairwise(moves))
            kinds = [order.emissions[number][1].action.kind for number in moves]
            assert not kinds or kinds[0] is Kind.WRITE


@given(STEPS, st.integers(1, 4), st.integers(1, 3))
def test_the_clip_factor_waits_for_every_sum_and_no_norm_is_taken_twice(script, buffers, paths):
    order = run(script, buffers, paths)
    norms = order.numbers(lambda e: e.action.kind is Kind.NORM)
    downs = order.numbers(lambda e: e.action.kind is Kind.DOWN)
    assert len(norms) == len(downs)
    for clip in order.numbers(lambda e: e.action.kind is Kind.CLIP):
        assert all(order.holds(norm, clip) for norm in norms if norm < clip)


def test_a_step_in_full():
    """One bucket, two micro-batches, one path."""
    order = run([([{0}, {0}], "updated")], buffers=2, paths=1)
    assert [str(emission.action) for _, emission in order.emissions] == [
        *("0DOWN0.b0", "0NORM0.b0", "0WRITE0.g0@p0"),
        *("0READ1.g0@p0", "0DOWN1.b0", "0NORM1.b0", "0WRITE1.g0@p0"),
        *("0CLIP", "0READ.g0@p0", "0U.b0", "0UP.b0"),
    ]


def test_new_weights_that_go_to_the_disk_hold_their_buffer():
    """They lie in place of the gradient until every path has them."""
    waiting = Waiting(1, 2)
    list(waiting.arriving(Sync().gradient(0, bucket_of(0), StepShape(1, 2)), 0))
    list(waiting.arriving(Sync().gradient(0, bucket_of(1), StepShape(1, 2)), 0))
    homes = [parse(f"0WRITE.w0@p{path}") for path in range(2)]
    update = Action(Kind.UPDATE, unit=bucket(0))
    emissions = [Emission(update, ()), *(Emission(home, (Wait(update),)) for home in homes)]
    emissions.append(Emission(Action(Kind.UPDATE, unit=bucket(1)), ()))
    found = list(waiting.around(emissions, 0))
    assert [e.place.gradient for e in found if e.action in homes] == [0, 0]
    reads = [e for e in found if str(e.action).startswith("0READ.g1")]
    assert len(reads) == 2
    assert all({update, *homes} <= {wait.action for wait in read.after} for read in reads)
