"""Shares of paths that change while a buffer is on its way to some of them."""

from hypothesis import given
from hypothesis import strategies as st
from test_disk import MIXED, memory, read, same, store_on

from headrace.machine.paths import UNIT
from headrace.memory.parts import Form


@given(st.permutations(range(3)), st.integers(0, 3))
def test_all_paths_write_a_buffer_by_the_same_shares(tmp_path_factory, order, changed):
    home, form = tmp_path_factory.mktemp("disk"), Form(MIXED, 9 * UNIT + 5)
    store = store_on(*(home / str(number) for number in range(3)))
    store.declare("b0", form)
    for seed, shares in enumerate([[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]):
        held, back = memory(form, seed), memory(form)
        for number, index in enumerate(order):
            if number == changed:
                store.speeds.shares = shares
            store.write("b0", index, held)
        read(store, "b0", back)
        assert same(held, back)
    store.close()
