import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from headrace.data import sources, tokenise
from headrace.data.config import DataConfig
from headrace.data.estimate import estimate
from headrace.data.prepare import prepare
from headrace.errors import UserError

TOKENIZER = byte_level()
WORDS = ["the", "mill", "wheel", "never", "stops", "and", "water", "comes", "by", "a", "channel"]


def lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def texts(count, seed=0, longest=40):
    source = random.Random(seed)
    return [{"text": " ".join(source.choices(WORDS, k=source.randint(1, longest)))} for _ in range(count)]


def chats(count):
    source = random.Random(1)
    return [
        {
            "messages": [
                {"role": r, "content": " ".join(source.choices(WORDS, k=4))} for r in ("user", "assistant")
            ]
        }
        for _ in range(count)
    ]


def ready(config, tmp_path, tokenizer=TOKENIZER, seed=0, **options):
    return prepare(
        config, tokenizer, directory=tmp_path / "run" / "data", batch=4, micro_batch=2, seed=seed, **options
    )


def documents_of(loader):
    return [
        tuple(batch.input_ids_BL[row, start:stop].tolist())
        for batch in loader.in_order()
        for row, start, stop in batch.documents
    ]


def test_all_formats_and_the_report(tmp_path):
    config = DataConfig(train=lines(tmp_path / "a.jsonl", chats(30)), context=64, eval=0.1)
    prepared = ready(config, tmp_path)
    train, held_out = prepared.train, prepared.eval
    assert (train.documents, held_out.documents) == (27, 3)
    assert prepared.lines() == [
        f"train: 30 records, 27 documents, {train.tokens:,} tokens ({train.trained_tokens:,} trained), "
        f"{train.rows} rows of 64 ({train.tokens / train.rows / 64:.0%} full)",
        f"eval: 3 documents, {held_out.tokens} tokens ({held_out.trained_tokens} trained), "
        f"{held_out.rows} rows of 64 ({held_out.tokens / held_out.rows / 64:.0%} full)",
    ]
    answers = sum(
        len(TOKENIZER(chat["messages"][1]["content"] + "<|im_end|>")["input_ids"]) for chat in chats(30)
    )
    assert train.trained_tokens + held_out.trained_tokens == answers


def test_parquet_and_json_lines_give_the_same_documents(tmp_path):
    values = chats(20)
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
    found = [
        documents_of(ready(DataConfig(train=path, context=64), tmp_path).train)
        for path in (lines(tmp_path / "a.jsonl", values), str(tmp_path / "a.parquet"))
    ]
    assert found[0] == found[1] and len(found[0]) == 20


@settings(max_examples=15, deadline=None)
@given(context=st.integers(2, 40), block=st.integers(20, 400), packing=st.booleans())
def test_every_token_of_a_text_is_used_once(tmp_path_factory, context, block, packing):
    tmp_path = tmp_path_factory.mktemp("text")
    text = "\n".join(value["text"] for value in texts(40))
    (tmp_path / "a.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        config = DataConfig(train=str(tmp_path / "a.txt"), context=context, packing=packing)
        prepared = ready(config, tmp_path)
    whole = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
    pieces = [tuple(whole[start : start + context]) for start in range(0, len(whole), context)]
    found = documents_of(prepared.train)
    assert (sorted(found) if packing else found) == (sorted(pieces) if packing else pieces)
    assert prepared.train.longest_row == min(context, len(whole))
    assert prepared.parts[0].tally.records == 1


def test_resume_reads_what_the_first_run_wrote(tmp_path, monkeypatch):
    config = DataConfig(train=lines(tmp_path / "a.jsonl", texts(50)), context=32, eval=0.2)
    first = ready(config, tmp_path)
    assert os.listdir(tmp_path / "run") == ["data"] and len(os.listdir(tmp_path / "run" / "data")) == 1
    monkeypatch.setattr(tokenise, "write", None)
    second = ready(config, tmp_path)
    assert second.fingerprint == first.fingerprint and second.lines() == first.lines()
    assert documents_of(second.train) == documents_of(first.train)
    assert documents_of(second.eval) == documents_of(first.eval)


def test_fingerprint_follows_whatever_changes_the_data(tmp_path):
    path = lines(tmp_path / "a.jsonl", texts(20))
    base = {"train": path, "context": 64}
    prints = [ready(DataConfig(**base), tmp_path).fingerprint]
    for change in ({"context": 65}, {"packing": False}, {"eval": 0.1}, {"over_long": "cut"}):
        prints.append(ready(DataConfig(**{**base, **change}), tmp_path).fingerprint)
    prints.append(ready(DataConfig(**base), tmp_path, seed=1).fingerprint)
    prints.append(ready(DataConfig(**base), tmp_path, tokenizer=byte_level(template=None)).fingerprint)
    moved = lines(tmp_path / "moved.jsonl", texts(20))
    assert ready(DataConfig(train=moved, context=64), tmp_path).fingerprint == prints[0]
    lines(tmp_path / "a.jsonl", texts(21))
    prints.append(ready(DataConfig(**base), tmp_path).fingerprint)
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("packing", [True, False])
def test_split_is_disjoint_complete_and_seeded(tmp_path, packing):
    config = DataConfig(train=lines(tmp_path / "a.jsonl", texts(50)), context=256, eval=0.3, packing=packing)
    runs = [ready(config, tmp_path, seed=seed) for seed in (0, 0, 1)]
    parts = [(sorted(documents_of(p.train)), sorted(documents_of(p.eval))) for p in runs]
    assert parts[0] == parts[1] != parts[2]
    everything = sorted((*TOKENIZER(v["text"])["input_ids"], TOKENIZER.eos_token_id) for v in texts(50))
    for train, held_out in parts:
        assert sorted(train + held_out) == everything and len(held_out) == 15


def test_share_of_one_document_is_refused(tmp_path):
    config = DataConfig(train=lines(tmp_path / "a.jsonl", texts(1)), eval=0.5)
    with pytest.raises(UserError, match=r"data\.eval=0\.5 can't hold out a share of a single document"):
        ready(config, tmp_path)


def test_evaluation_from_files_of_its_own(tmp_path):
    config = DataConfig(
        train=lines(tmp_path / "a.jsonl", texts(9)), eval=lines(tmp_path / "b.jsonl", chats(5)), context=64
    )
    prepared = ready(config, tmp_path)
    assert (prepared.train.documents, prepared.eval.documents) == (9, 5)
    assert [part.tally.records for part in prepared.parts] == [9, 5]
    with pytest.raises(UserError, match=r"data\.eval: there is no file or directory"):
        ready(DataConfig(train=config.train, eval="none.jsonl"), tmp_path)


def chat_of(words):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "mill " * words}]}


def test_over_long_records(tmp_path):
    prompt_too_long = {"prompt": "mill " * 90 + "a", "completion": " b"}
    for values, kept in (
        ([chat_of(2), chat_of(90)], 2),
        ([{"prompt": "a", "completion": "b"}, prompt_too_long], 1),
    ):
        path = lines(tmp_path / "a.jsonl", values)
        with pytest.raises(UserError, match=r"a\.jsonl:2 has \d+ tokens, more than data\.context=64; raise"):
            ready(DataConfig(train=path, context=64), tmp_path)
        skipped = ready(DataConfig(train=path, context=64, over_long="skip"), tmp_path)
        assert skipped.train.documents == 1 and skipped.parts[0].tally.over_long == 1
        assert skipped.lines()[1] == "! 1 record longer than 64 tokens and left out"
        cut = ready(DataConfig(train=path, context=64, over_long="cut"), tmp_path)
        assert cut.train.documents == kept and cut.parts[0].tally.cut == kept - 1
        assert cut.parts[0].tally.over_long == 2 - kept and cut.train.longest_row <= 64


def test_missing_evaluation_data_is_said_before_anything_is_tokenised(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the mill"}\n')
    for absent in (str(tmp_path / "b.jsonl"), [str(tmp_path / "b.jsonl")]):
        config = DataConfig(train=str(tmp_path / "a.jsonl"), eval=absent, context=8)
        with pytest.raises(UserError, match=r"data\.eval: there is no file or directory .*b\.jsonl"):
            ready(config, tmp_path / "tokenised")
    assert not (tmp_path / "tokenised").exists()


def test_skipped_records_are_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 1}\n{"text": "the mill"}\n{"text": "caf\xe9"}\n{"text": ""}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:1 has the fields 'id' where text, or prompt"):
        ready(DataConfig(train=str(path)), tmp_path)
    prepared = ready(DataConfig(train=str(path), bad_records="skip"), tmp_path)
    assert prepared.train.documents == 1
    assert prepared.lines()[1:] == [
        f"! 3 records skipped, the first: {path}:1 has the fields 'id' where text, or prompt and completion, "
        "or messages, or instruction and output, or conversations are needed",
        "! train.batch=4 is more than there is: every step has 1 row",
    ]


def test_nothing_left_is_an_error_whatever_the_switch(tmp_path):
    path = tmp_path / "a.jsonl"
    for content, message in (
        ("", r"data\.train holds no document to train on: 1 record skipped, the first: .*a\.jsonl is empty"),
        ('{"id": 1}\n', r"data\.train holds no document to train on: 1 record skipped"),
        ('{"text": ""}\n' * 2, r"data\.train holds no document .* 2 records skipped.* has an empty 'text'"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            ready(DataConfig(train=str(path), bad_records="skip"), tmp_path)
        assert os.listdir(tmp_path / "run" / "data") == []


def test_document_without_anything_to_train_on(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"prompt": "", "completion": ""}])
    with pytest.raises(UserError, match=r"a\.jsonl:1 has nothing to train on"):
        ready(DataConfig(train=path), tmp_path)


def test_settings_that_do_not_fit_the_records(tmp_path):
    (tmp_path / "a.txt").write_text("the mill")
    path = lines(tmp_path / "a.jsonl", texts(2))
    with pytest.raises(
        UserError, match=r"data\.format=messages needs JSON or Parquet records, and .*a\.txt is"
    ):
        ready(DataConfig(train=str(tmp_path / "a.txt"), format="messages"), tmp_path)
    with pytest.raises(UserError, match=r"data\.loss_on=assistant has no meaning with data\.format=text"):
        ready(DataConfig(train=path, loss_on="assistant"), tmp_path)
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no field 'prompt' but 'text'"):
        ready(DataConfig(train=path, format="completion"), tmp_path)


def test_progress_counts_bytes(tmp_path):
    path = lines(tmp_path / "a.jsonl", texts(3000))
    calls = []
    ready(DataConfig(train=path), tmp_path, on_progress=lambda done, total: calls.append((done, total)))
    size = os.path.getsize(path)
    assert len(calls) == 3 and calls[-1] == (size, size) and sorted(calls) == calls


def test_truncation_of_the_tokenizer_is_not_used(tmp_path):
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    config = DataConfig(train=lines(tmp_path / "a.jsonl", texts(20)))
    assert ready(config, tmp_path, tokenizer).train.tokens == ready(config, tmp_path / "other").train.tokens


@pytest.mark.parametrize("packing", [True, False])
def test_estimate_is_of_the_right_size(tmp_path, packing):
    config = DataConfig(train=lines(tmp_path / "a.jsonl", texts(2000)), context=64, packing=packing, eval=0.1)
    guess, prepared = estimate(config), ready(config, tmp_path)
    for near, exact in (
        (guess.documents, prepared.train.documents),
        (guess.tokens, prepared.train.tokens),
        (guess.rows, prepared.train.rows),
    ):
        assert 0.5 < near / exact < 2
    assert np.isclose(
        estimate(DataConfig(train=config.train, context=64)).tokens * 0.9, guess.tokens, rtol=0.01
    )


def test_estimate_of_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text("broken\n")
    with pytest.raises(UserError, match=r"holds no record"):
        estimate(DataConfig(train=str(tmp_path / "a.jsonl")))
