import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from headrace.data import sources
from headrace.data.sources import find_sources, read_records
from headrace.data.tally import Tally
from headrace.data.tokens import encode
from headrace.errors import UserError


def read(path, policy="error"):
    tally = Tally(policy)
    return list(read_records(find_sources(str(path), "data.train"), tally)), tally


def put(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_json_lines_with_places_and_blank_lines(tmp_path):
    path = put(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": "two"}')
    records, _ = read(path)
    assert [(r.place, r.fields["text"]) for r in records] == [(f"{path}:1", "one"), (f"{path}:4", "two")]
    assert all(r.first and r.last for r in records)


FLAWS = {
    "not UTF-8": (b'{"text": "caf\xe9"}\n', r"a\.jsonl:2 is not UTF-8 \(byte 0xe9 at column 14\)"),
    "truncated": (
        b'{"text": "one',
        r"a\.jsonl:2 is not whole, valid JSON \(Unterminated string .* column 10\)",
    ),
    "array": (b"[1, 2]\n", r"a\.jsonl:2 is not a JSON object with named fields"),
    "null": (b"null\n", r"a\.jsonl:2 is not a JSON object with named fields"),
    "deep": (b"[" * 100_000 + b"\n", r"a\.jsonl:2 is nested too deeply"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flawed_line_is_named_or_skipped_and_counted(tmp_path, flaw):
    raw, message = FLAWS[flaw]
    path = put(tmp_path / "a.jsonl", b'{"text": "good"}\n' + raw)
    with pytest.raises(UserError, match=message):
        read(path)
    with pytest.raises(UserError, match=r"data\.bad_records=skip"):
        read(path)
    records, tally = read(path, "skip")
    assert [r.fields["text"] for r in records] == ["good"]
    assert tally.skipped == 1 and "a.jsonl:2" in tally.first_skipped


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_named_or_skipped(tmp_path, name, content):
    path = put(tmp_path / name, content)
    with pytest.raises(UserError, match=rf"{name} is empty"):
        read(path)
    assert read(path, "skip")[1].skipped == 1


def test_json_array(tmp_path):
    path = put(tmp_path / "a.json", ' \n[{"text": "one"}, 3, {"text": "two"}]')
    with pytest.raises(UserError, match=r"a\.json \(record 2\) is not a JSON object"):
        read(path)
    records, tally = read(path, "skip")
    assert [r.fields["text"] for r in records] == ["one", "two"] and tally.skipped == 1
    with pytest.raises(UserError, match=r"a\.json is not whole, valid JSON"):
        read(put(tmp_path / "a.json", '[{"text": "one"}'))


def test_json_suffix_may_hold_lines(tmp_path):
    records, _ = read(put(tmp_path / "a.json", '{"text": "one"}\n{"text": "two"}\n'))
    assert [r.fields["text"] for r in records] == ["one", "two"]


def test_parquet_rows_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{n}"}] for n in range(5)
    ]
    pq.write_table(pa.table({"messages": messages, "id": range(5)}), "a.parquet", row_group_size=2)
    before = sorted(os.listdir(tmp_path))
    records, _ = read("a.parquet")
    assert [r.fields["messages"] for r in records] == messages
    assert records[2].place == "a.parquet (row 3)"
    assert sorted(os.listdir(tmp_path)) == before


def test_broken_and_empty_parquet(tmp_path):
    path = put(tmp_path / "a.parquet", b"PAR1 nothing")
    with pytest.raises(UserError, match=r"a\.parquet is not a readable Parquet file"):
        read(path)
    assert read(path, "skip")[1].skipped == 1
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match=r"a\.parquet is empty"):
        read(path)


def test_directory_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "deep" / ".cache").mkdir(parents=True)
    put(tmp_path / "deep" / "b.txt", "b")
    put(tmp_path / "a.text", "a")
    put(tmp_path / "deep" / ".cache" / "c.txt", "c")
    put(tmp_path / "README.md", "no")
    assert [r.fields["text"] for r in read(tmp_path)[0]] == ["a", "b"]


def test_what_cannot_be_found_is_named_with_its_key(tmp_path):
    put(tmp_path / "a.txt", "a")
    put(tmp_path / "a.jsonl", "{}")
    put(tmp_path / "a.csv", "a")
    (tmp_path / "empty").mkdir()
    for name, message in [
        ("none.txt", r"data\.eval: there is no file or directory .*none\.txt"),
        ("a.csv", r"data\.eval: .*a\.csv is of no known type; name one of \.txt"),
        ("empty", r"data\.eval: the directory .*empty holds no file of a known type"),
        (".", r"data\.eval mixes json \(.*a\.jsonl\) and text \(.*a\.txt\)"),
    ]:
        with pytest.raises(UserError, match=message):
            find_sources(str(tmp_path / name), "data.eval")


def test_file_that_the_system_refuses(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jsonl", "{}")
    found = find_sources(str(path), "data.train")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(Is a directory\)"):
        list(read_records(found, Tally()))
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read \(Is a directory\)"):
        sources.digest(path)


def test_text_line_that_is_not_utf8(tmp_path):
    path = put(tmp_path / "a.txt", b"one\ntw\xff\nthree\n")
    with pytest.raises(UserError, match=r"a\.txt:2 is not UTF-8 \(byte 0xff at column 3\)"):
        read(path)
    records, tally = read(path, "skip")
    assert records[0].fields["text"] == "one\nthree\n" and tally.skipped == 1


def test_long_text_is_divided_where_no_token_is(tmp_path, monkeypatch):
    lines = [f"{'  ' * (n % 3)}line {n} of the mill\n" + "\n" * (n % 4 == 0) for n in range(300)]
    path = put(tmp_path / "a.txt", "".join(lines))
    monkeypatch.setattr(sources, "BLOCK", 100)
    records, _ = read(path)
    texts = [r.fields["text"] for r in records]
    assert len(records) > 40 and "".join(texts) == "".join(lines)
    assert [r.first for r in records] == [True] + [False] * (len(records) - 1)
    assert [r.last for r in records] == [False] * (len(records) - 1) + [True]
    tokenizer = byte_level()
    pieces = [token for ids in encode(tokenizer, texts) for token in ids.tolist()]
    assert pieces == encode(tokenizer, ["".join(lines)])[0].tolist()
    assert sum(r.nbytes for r in records) == path.stat().st_size


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    st.lists(
        st.dictionaries(st.text(max_size=5), json_values, min_size=1, max_size=3), min_size=1, max_size=6
    )
)
def test_whatever_json_holds_is_read_back(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in values))
    assert [r.fields for r in read(path)[0]] == values
    path = path.with_suffix(".json")
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    assert [r.fields for r in read(path)[0]] == values
