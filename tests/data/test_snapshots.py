"""Data sets by their name on the hub: the files of one split, from its local cache and never the network."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_cache import HubCache
from tiny_tokenizers import byte_level

from headrace.data.config import DataConfig
from headrace.data.estimate import estimate
from headrace.data.prepare import prepare
from headrace.data.sources import find_sources, read_records
from headrace.data.tally import Tally
from headrace.errors import UserError

TEXTS = [{"text": "the mill"}, {"text": "the wheel turns"}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return HubCache(tmp_path / "hub", monkeypatch)


def jsonl(*records):
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def parquet(*records):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(records)), sink)
    return sink.getvalue().to_pybytes()


def named(*names):
    """Files of these names, no two alike."""
    return {name: jsonl({"text": name}) for name in names}


def found(name, key="data.train"):
    files = find_sources(name, key).files
    return [path.as_posix().partition("/snapshots/")[2].partition("/")[2] for path in files]


def refusal(act, *arguments):
    with pytest.raises(UserError) as caught:
        act(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SHARDS = [f"data/train-0000{n}-of-00002.jsonl" for n in range(2)]
HASHED = "data/train-00000-of-00001-a09b74b3ef9c3b56.jsonl"
CLEAR = [
    (["alpaca_data.json", "README.md", "dataset_infos.json", ".gitattributes"], ["alpaca_data.json"], None),
    ([HASHED], [HASHED], None),
    (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
    ([*SHARDS, "data/test-00000-of-00001.jsonl"], SHARDS, ["data/test-00000-of-00001.jsonl"]),
    (["train/1.jsonl", "train/2.jsonl", "dev/1.jsonl"], ["train/1.jsonl", "train/2.jsonl"], ["dev/1.jsonl"]),
    (["train.jsonl", "test.jsonl", "validation.jsonl"], ["train.jsonl"], ["validation.jsonl"]),
    (["my-training_2.jsonl", "latest.jsonl"], ["my-training_2.jsonl"], None),
    (["a-1.jsonl", "a-2.jsonl", "a-10.jsonl"], ["a-1.jsonl", "a-10.jsonl", "a-2.jsonl"], None),
]  # fmt: skip


@pytest.mark.parametrize(("names", "train", "evaluated"), CLEAR, ids=[row[1][0] for row in CLEAR])
def test_the_files_of_one_split(cache, names, train, evaluated):
    cache.add("dataset", "mill/texts", named(*names))
    assert found("mill/texts") == train
    if evaluated is None:
        sentence = refusal(find_sources, "mill/texts", "data.eval")
        assert "has no validation or test split but " in sentence and "data.eval=0.05" in sentence
    else:
        assert found("mill/texts", "data.eval") == evaluated


UNCLEAR = [
    (["a.jsonl", "b.jsonl"], "it is not clear which files of mill/texts are meant, it has a.jsonl, b.jsonl"),
    (["data/train_sft-1.jsonl", "data/train_gen-1.jsonl"], "it is not clear which files"),
    (["en/train.jsonl", "fr/train.jsonl"], "it is not clear which files"),
    (["test.jsonl"], "has no train split but test.jsonl: name files in "),
    (["more.jsonl", "test.jsonl"], "has no train split but more.jsonl, test.jsonl"),
    (["README.md", "dataset_infos.json", ".hidden/train.jsonl"], "has no file of a known type"),
    (SHARDS[:1], "is not whole in the hub's cache"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "message"), UNCLEAR, ids=[row[0][0] for row in UNCLEAR])
def test_what_is_not_clear_is_refused(cache, names, message):
    snapshot = cache.add("dataset", "mill/texts", named(*names))
    sentence = refusal(find_sources, "mill/texts", "data.train")
    assert sentence.startswith("data.train: ") and message in sentence and str(snapshot) in sentence


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mill/texts", "hf download mill/texts --repo-type dataset fetches it"),
        ("mill/texts@v2", "hf download mill/texts --repo-type dataset --revision v2 fetches it"),
    ],
)
def test_what_is_not_in_the_cache_is_refused_with_the_command(cache, tmp_path, name, command):
    cache.add("model", "mill/texts", named("train.jsonl"))
    sentence = refusal(find_sources, name, "data.train")
    assert f"data.train: {name} is no path here (paths are relative to {tmp_path})" in sentence
    assert command in sentence


def test_a_file_that_the_hub_is_known_to_have_is_missed(cache):
    files = named("train-1.jsonl", "train-2.jsonl", "other.bin")
    snapshot = cache.add("dataset", "mill/texts", files)
    tree = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "0" * 40} for name in files}}
    listing = snapshot.parents[1] / "trees" / f"{snapshot.name}.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps(tree))
    (snapshot / "other.bin").unlink()
    assert found("mill/texts") == ["train-1.jsonl", "train-2.jsonl"]
    (snapshot / "train-2.jsonl").unlink()
    assert "is not whole in the hub's cache" in refusal(find_sources, "mill/texts", "data.train")


def test_a_link_without_its_file_is_missed(cache):
    snapshot = cache.add("dataset", "mill/texts", named("train.jsonl"))
    (snapshot / "train.jsonl").resolve().unlink()
    assert "hf download mill/texts --repo-type dataset fetches the rest" in refusal(
        find_sources, "mill/texts", "data.train"
    )


def test_what_is_there_wins_over_the_cache(cache, tmp_path):
    cache.add("dataset", "mill/texts", named("train.jsonl"))
    (tmp_path / "mill" / "texts").mkdir(parents=True)
    (tmp_path / "mill" / "texts" / "own.jsonl").write_bytes(jsonl(*TEXTS))
    assert [str(path) for path in find_sources("mill/texts", "data.train").files] == ["mill/texts/own.jsonl"]


@pytest.mark.parametrize("name", ["data/a.jsonl", "data/a.txt", "a/b/c", "./data", "data"])
def test_what_looks_like_a_path_is_one(cache, tmp_path, name):
    sentence = refusal(find_sources, name, "data.train")
    assert sentence.startswith(f"data.train: there is no file or directory {name.removeprefix('./')} ")
    assert f"(paths are relative to {tmp_path})" in sentence


def test_names_and_files_may_stand_together_but_once(cache, tmp_path):
    snapshot = cache.add("dataset", "mill/texts", {name: jsonl(*TEXTS) for name in SHARDS})
    (tmp_path / "own.jsonl").write_bytes(jsonl(*TEXTS))
    given = ["mill/texts", "own.jsonl"]
    assert len(find_sources(given, "data.train").files) == 3, "equal shards are links to one blob"
    for second in ("mill/texts", f"mill/texts@{snapshot.name}", str(snapshot / SHARDS[0])):
        assert "would count twice" in refusal(find_sources, ["mill/texts", second], "data.train")


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_links_are_read_as_files_are(cache, tmp_path, suffix, write):
    cache.add("dataset", "mill/texts", {f"data/train.{suffix}": write(*TEXTS)})
    (tmp_path / f"own.{suffix}").write_bytes(write(*TEXTS))
    read = [
        list(read_records(find_sources(name, "data.train"), Tally()))
        for name in ("mill/texts", f"own.{suffix}")
    ]
    assert [[record.fields for record in records] for records in read] == [TEXTS, TEXTS]
    options = {"directory": tmp_path / "tokenised", "batch": 1, "micro_batch": 1, "seed": 0}
    configs = [DataConfig(train=name, context=16) for name in ("mill/texts", f"own.{suffix}")]
    keys = {prepare(config, byte_level(), **options).fingerprint for config in configs}
    assert len(keys) == 1, "the same bytes are the same data, wherever they lie"
    assert estimate(configs[0]) == estimate(configs[1])
    cache.add("dataset", "mill/texts", {f"data/train.{suffix}": write(*TEXTS[1:])})
    assert prepare(configs[0], byte_level(), **options).fingerprint not in keys
