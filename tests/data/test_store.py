import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import store
from headrace.data.formats import Document
from headrace.data.sources import Record
from headrace.data.store import Documents, is_complete, write
from headrace.data.tally import Tally
from headrace.errors import UserError

RECORD = Record("a.jsonl:1", {}, 1)


def documents(contents):
    return [
        Document(
            RECORD, np.asarray([i for i, _ in each], np.int32), np.asarray([t for _, t in each], np.bool_)
        )
        for each in contents
    ]


tokens = st.tuples(st.integers(0, 2**31 - 1), st.booleans())


@settings(max_examples=40, deadline=None)
@given(
    contents=st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=12),
    picks=st.lists(st.integers(0, 10**6), min_size=1, max_size=20),
)
def test_what_was_written_is_fetched_in_any_order(tmp_path_factory, contents, picks):
    home = tmp_path_factory.mktemp("data") / "key"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_BATCH_TOKENS", 10)
        write(home, documents(contents), Tally(records=3, first_skipped="x"))
    found = Documents(home)
    assert found.tally == Tally(records=3, first_skipped="x") and found.key == "key"
    assert found.lengths.tolist() == [len(each) for each in contents]
    assert found.trained_tokens.tolist() == [sum(t for _, t in each[1:]) for each in contents]
    picks = [pick % len(contents) for pick in picks]
    fetched = [list(zip(ids.tolist(), trained.tolist(), strict=True)) for ids, trained in found.fetch(picks)]
    assert fetched == [contents[pick] for pick in picks]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from headrace.data.store import write
from headrace.data.tally import Tally
from test_store import documents
def dying():
    yield from documents([[(1, True)] * 600_000] * {written})
    os.kill(os.getpid(), signal.SIGKILL)
write(Path({home!r}), dying(), Tally())
"""


@pytest.mark.parametrize("written", [0, 3])
def test_killed_while_writing(tmp_path, written):
    home = tmp_path / "key"
    code = KILLED.format(tests=str(Path(__file__).parent), written=written, home=str(home))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not is_complete(home) and len(os.listdir(tmp_path)) == 1
    write(home, documents([[(1, True), (2, True)]]), Tally())
    assert is_complete(home) and os.listdir(tmp_path) == ["key"]


def test_failure_while_writing_leaves_nothing(tmp_path):
    def failing():
        yield from documents([[(1, True)]])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "key", failing(), Tally())
    assert os.listdir(tmp_path) == []


def test_torn_files_are_not_complete(tmp_path):
    home = tmp_path / "key"
    assert not is_complete(home)
    write(home, documents([[(1, True), (2, True)]]), Tally())
    rows = home / "documents.arrow"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1])
    assert not is_complete(home)
    rows.write_bytes(whole)
    (home / "summary.json").write_text(json.dumps({})[:1])
    assert not is_complete(home)
    write(home, documents([[(3, True)]]), Tally())
    assert is_complete(home) and Documents(home).fetch([0])[0][0].tolist() == [3]


def test_full_disk_is_named(tmp_path):
    def full():
        yield from documents([[(1, True)]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=f"no space is left on the disk of {tmp_path}"):
        write(tmp_path / "key", full(), Tally())
    assert os.listdir(tmp_path) == []
