from collections import namedtuple

import checkpoint_example as example
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint import space
from headrace.checkpoint.space import check_space, free_bytes, readable
from headrace.errors import UserError

GIB = 2**30


@pytest.fixture
def free(monkeypatch):
    def set_free(nbytes):
        usage = namedtuple("usage", "total used free")(0, 0, nbytes)
        monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage)

    return set_free


def test_numbers_and_knob_are_named(tmp_path, free):
    free(4 * GIB)
    check_space(tmp_path, 2 * GIB, keep=1)
    with pytest.raises(UserError) as error:
        check_space(tmp_path, 2 * GIB, keep=3)
    assert "keep=3 and the one being written, 2.0 GiB each, need 8.0 GiB more" in str(error.value)
    assert "where 4.0 GiB are free: set checkpoint.keep=1, or choose an out" in str(error.value)
    with pytest.raises(UserError, match=r"need 4\.0 GiB .*: make room, or"):
        check_space(tmp_path, 2 * GIB + 1, keep=1)


@pytest.mark.parametrize("keep", [3, 99_999_999_999_999, 10**30])
def test_the_most_that_fits_is_named_however_much_was_asked(tmp_path, free, keep):
    free(4 * GIB)
    with pytest.raises(UserError, match=r": set checkpoint\.keep=1, or choose"):
        check_space(tmp_path, 2 * GIB, keep=keep)
    free(3 * GIB)
    with pytest.raises(UserError, match=r": make room, or choose"):
        check_space(tmp_path, 2 * GIB, keep=keep)


def test_standing_checkpoints_count_but_one_more_always_fits(tmp_path, free, no_fsync):
    path = example.save(tmp_path, 1)
    one = sum(file.stat().st_size for file in path.iterdir())
    free(one)
    check_space(tmp_path, one, keep=1)
    free(one - 1)
    with pytest.raises(UserError):
        check_space(tmp_path, one, keep=1)
    example.save(tmp_path, 2, keep=2)
    with pytest.raises(UserError):
        check_space(tmp_path, one, keep=1)


@given(st.integers(1, 100), st.integers(1, 5), st.integers(0, 6), st.integers(2, 12))
def test_the_space_suffices_for_saves_one_by_one(one, keep, standing, saves):
    held = highest = standing * one
    for _ in range(saves):
        held += one
        highest = max(highest, held)
        held = min(held, keep * one)
    needed = space._needed(one, keep, standing * one)
    assert highest - standing * one <= needed
    assert saves <= keep or highest - standing * one == needed


def test_free_bytes_of_a_directory_that_is_not_there_yet(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") > 0


def test_readable():
    assert [readable(n) for n in (3 << 20, 1536 << 20, 91 * GIB)] == ["3.0 MiB", "1.5 GiB", "91.0 GiB"]
