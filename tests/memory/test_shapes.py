from hypothesis import given
from hypothesis import strategies as st

from headrace.memory.shapes import round_length


@given(st.integers(1, 10**6))
def test_bounds(length):
    rounded = round_length(length)
    assert length <= rounded <= max(length + 15, length * 5 // 4 + 1)
    assert round_length(rounded) == rounded
    assert rounded % 16 == 0


def test_few_lengths():
    assert len({round_length(n) for n in range(1, 4097)}) == 28
    assert [round_length(n) for n in (1, 16, 17, 128, 129, 161, 256, 257, 4096)] == [
        *(16, 16, 32, 128, 160, 192, 256, 320, 4096)
    ]
