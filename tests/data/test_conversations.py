"""Alpaca's and ShareGPT's records are the chats that they stand for, and what cannot be read is refused."""

import json
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import MARKED, SMOLLM, STRICT, byte_level, metaspace

from headrace.data.chat import ChatEncoder
from headrace.data.config import DataConfig
from headrace.data.estimate import estimate
from headrace.data.formats import detect_format
from headrace.data.prepare import prepare
from headrace.data.sources import Record
from headrace.data.tally import Tally
from headrace.errors import UserError

TALK = [
    ("user", "What is a headrace?"),
    ("assistant", "It is a channel."),
    ("user", "And a tailrace?\n"),
    ("assistant", "That one leads the water away."),
]
SYSTEM = ("system", "You know mills.")
NAMES = {"system": ["system"], "user": ["human", "user"], "assistant": ["gpt", "assistant", "chatgpt"]}
TEMPLATES = {"plain": SMOLLM, "marked": MARKED, "strict": STRICT}
ONLY_KNOWN = SMOLLM.replace(
    "{{'<|im_start|>' + message['role']",
    "{% if message['role'] == 'tool' %}{% continue %}{% endif %}{{'<|im_start|>' + message['role']",
)
ALPACA = {"instruction": "Name the channel.", "input": "It feeds a mill.", "output": "A headrace."}


def messages(*spoken):
    return {"messages": [{"role": role, "content": text} for role, text in spoken]}


def sharegpt(*spoken, spelling=0):
    names = {role: options[spelling % len(options)] for role, options in NAMES.items()}
    return {"conversations": [{"from": names[role], "value": text} for role, text in spoken]}


def encode(format, *fields, tokenizer=None, loss_on="assistant", policy="error"):
    records = [Record(f"a.jsonl:{n}", each, 1) for n, each in enumerate(fields, start=1)]
    tally = Tally(policy)
    return list(ChatEncoder(tokenizer or byte_level(), loss_on, format).encode(records, tally)), tally


def assert_same_bits(found, expected):
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours.ids, theirs.ids, strict=True)
        np.testing.assert_array_equal(ours.trained, theirs.trained, strict=True)
        assert ours.trained_tokens > 0


@pytest.mark.parametrize("loss_on", ["assistant", "completion", "all"])
@pytest.mark.parametrize(
    ("make", "template"),
    [(byte_level, "plain"), (byte_level, "marked"), (byte_level, "strict"), (metaspace, "marked")],
)
def test_sharegpt_is_bit_equal_to_the_same_chats_as_messages(make, template, loss_on):
    tokenizer = make(TEMPLATES[template])
    talks = [TALK, TALK[:2]] if template == "strict" else [TALK, TALK[:2], [SYSTEM, *TALK]]
    expected, _ = encode(
        "messages", *(messages(*talk) for talk in talks), tokenizer=tokenizer, loss_on=loss_on
    )
    for spelling in range(3):
        given = (sharegpt(*talk, spelling=spelling) for talk in talks)
        found, tally = encode("sharegpt", *given, tokenizer=tokenizer, loss_on=loss_on)
        assert_same_bits(found, expected)
        assert tally.skipped == 0


def test_the_system_field_of_sharegpt_is_its_system_message():
    expected, _ = encode("messages", messages(SYSTEM, *TALK), messages(*TALK), messages(*TALK))
    found, _ = encode(
        "sharegpt",
        {**sharegpt(*TALK), "system": SYSTEM[1]},
        {**sharegpt(*TALK), "system": "", "tools": None},
        {**sharegpt(*TALK), "system": None, "tools": []},
    )
    assert_same_bits(found, expected)


def test_alpaca_is_bit_equal_to_the_chat_that_it_stands_for():
    ask, both = "Name the channel.", "Name the channel.\n\nIt feeds a mill."
    answer = ("assistant", "A headrace.")
    bare = {name: ALPACA[name] for name in ("instruction", "output")}
    pairs = [
        (ALPACA, [("user", both), answer]),
        (bare, [("user", ask), answer]),
        ({**bare, "input": ""}, [("user", ask), answer]),
        ({**bare, "input": None, "system": None, "history": None}, [("user", ask), answer]),
        ({**bare, "instruction": "", "input": ask}, [("user", ask), answer]),
        ({**ALPACA, "system": SYSTEM[1]}, [SYSTEM, ("user", both), answer]),
        ({**bare, "history": [["a?", "b."], ["c?", "d."]]},
         [("user", "a?"), ("assistant", "b."), ("user", "c?"), ("assistant", "d."), ("user", ask), answer]),
        ({**bare, "history": []}, [("user", ask), answer]),
    ]  # fmt: skip
    for loss_on in ("assistant", "completion", "all"):
        expected, _ = encode("messages", *(messages(*spoken) for _, spoken in pairs), loss_on=loss_on)
        found, tally = encode("alpaca", *(fields for fields, _ in pairs), loss_on=loss_on)
        assert_same_bits(found, expected)
        assert tally.skipped == 0


def refusal(act, *arguments, **options):
    with pytest.raises(UserError) as caught:
        act(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


TURN = {"from": "human", "value": "What?"}
CALL = [{"name": "look", "arguments": "{}"}]
SAID = {"from": "gpt", "value": "A channel."}


def turns(*given):
    return {"conversations": list(given)}


WRONG = [
    ("sharegpt", {"text": "a"}, "has no field 'conversations' but 'text'"),
    ("sharegpt", turns(), "has no list of messages in 'conversations'"),
    ("sharegpt", {"conversations": "hello"}, "has no list of messages in 'conversations'"),
    ("sharegpt", {"conversations": {"from": "gpt"}}, "has no list of messages in 'conversations'"),
    ("sharegpt", turns("hello"), "has a turn 1 that is no object with 'from' and 'value'"),
    ("sharegpt", turns(TURN, None), "has a turn 2 that is no object"),
    ("sharegpt", turns({"role": "user", "content": "a"}), "rename 'conversations' to 'messages'"),
    ("sharegpt", turns({"from": "human"}), "has no text in 'value' of turn 1 but null"),
    ("sharegpt", turns(TURN, {"from": "gpt", "value": 7}), "has no text in 'value' of turn 2 but int"),
    ("sharegpt", turns({"value": "a"}), "has no text in 'from' of turn 1 but null"),
    ("sharegpt", turns({"from": ["gpt"], "value": "a"}), "has no text in 'from' of turn 1 but list"),
    ("sharegpt", turns({"from": "alien", "value": "a"}), "'alien' is none of system, human, user, gpt"),
    ("sharegpt", turns({"from": "observation", "value": "42"}), "turn 1 from an unknown speaker"),
    ("sharegpt", turns(TURN, {"from": "gpt", "value": " \n"}), "has an empty 'value' in turn 2"),
    ("sharegpt", turns({**TURN, "value": ""}), "has an empty 'value' in turn 1"),
    ("sharegpt", turns({**TURN, "value": "\ud800"}), "half of a surrogate pair in 'value' of turn 1"),
    ("sharegpt", turns(TURN, {**SAID, "weight": 0}), "another weight than 1 in turn 2"),
    ("sharegpt", turns(TURN, {**SAID, "tool_calls": CALL}), "has 'tool_calls' in turn 2"),
    ("sharegpt", {**sharegpt(*TALK), "tools": "[look]"}, "has 'tools', which are not supported"),
    ("sharegpt", {**sharegpt(*TALK), "system": 3}, "has no text in 'system' but int"),
    ("sharegpt", {**sharegpt(SYSTEM, *TALK), "system": "a"}, "has both 'system' and a system turn 1"),
    ("sharegpt", sharegpt(*TALK[:1]), "has no message of the role 'assistant'"),
    ("sharegpt", sharegpt(*TALK[1:]), "begins with an answer"),
    ("alpaca", {"instruction": "a"}, "has no field 'output' but 'instruction'"),
    ("alpaca", {"output": "a"}, "has no field 'instruction' but 'output'"),
    ("alpaca", {**ALPACA, "output": ""}, "has an empty 'output'"),
    ("alpaca", {**ALPACA, "output": None}, "has no text in 'output' but null"),
    ("alpaca", {**ALPACA, "output": ["a"]}, "has no text in 'output' but list"),
    ("alpaca", {**ALPACA, "instruction": 5}, "has no text in 'instruction' but int"),
    ("alpaca", {**ALPACA, "instruction": " ", "input": ""}, "has an empty 'instruction'"),
    ("alpaca", {**ALPACA, "input": {"a": 1}}, "has no text in 'input' but dict"),
    ("alpaca", {**ALPACA, "system": 1}, "has no text in 'system' but int"),
    ("alpaca", {**ALPACA, "tools": CALL}, "has 'tools', which are not supported"),
    ("alpaca", {**ALPACA, "history": "before"}, "has in 'history' no pair of question and answer as entry 1"),
    ("alpaca", {**ALPACA, "history": [["a", "b"], ["c"]]}, "no pair of question and answer as entry 2"),
    ("alpaca", {**ALPACA, "history": [["a", None]]}, "has no text in entry 1 of 'history' but null"),
    ("alpaca", {**ALPACA, "history": [["", "b"]]}, "has an empty text in entry 1 of 'history'"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "fields", "message"), WRONG, ids=[row[2][:40] for row in WRONG])
def test_what_cannot_be_read_is_refused_or_left_out_by_the_switch(format, fields, message):
    sentence = refusal(encode, format, fields)
    assert sentence.startswith("a.jsonl:1 ") and message in sentence
    assert sentence.endswith("; correct it, or leave such records out with data.bad_records=skip")
    good = ALPACA if format == "alpaca" else sharegpt(*TALK)
    documents, tally = encode(format, fields, good, policy="skip")
    assert [document.record.place for document in documents] == ["a.jsonl:2"] and tally.skipped == 1


@pytest.mark.parametrize("template", [SMOLLM, ONLY_KNOWN])
def test_the_template_judges_what_a_tool_says(template):
    spoken = [TALK[0], ("tool", "42"), TALK[1]]
    given = sharegpt(*spoken[::2])
    given["conversations"].insert(1, {"from": "tool", "value": "42"})
    if template == SMOLLM:
        assert_same_bits(encode("sharegpt", given)[0], encode("messages", messages(*spoken))[0])
        return
    sentence = refusal(encode, "sharegpt", given, tokenizer=byte_level(template))
    assert "has a message 2 that the chat template leaves out; its role is 'tool'" in sentence


def test_the_template_judges_two_questions_in_a_row():
    twice = [TALK[0], TALK[0], TALK[1]]
    assert_same_bits(encode("sharegpt", sharegpt(*twice))[0], encode("messages", messages(*twice))[0])
    sentence = refusal(encode, "sharegpt", sharegpt(*twice), tokenizer=byte_level(STRICT))
    assert "a.jsonl:1 is refused by the chat template (" in sentence


@pytest.mark.parametrize("format", ["messages", "alpaca", "sharegpt"])
def test_a_tokenizer_without_a_template_is_named(tmp_path, format):
    tokenizer = byte_level(None)
    expected = (
        f"data.format={format} needs a chat template and the tokenizer has none; add chat_template.jinja to "
    )
    assert refusal(ChatEncoder, tokenizer, "assistant", format) == f"{expected}the model's directory"
    tokenizer.save_pretrained(tmp_path / "model")
    beside = type(tokenizer).from_pretrained(tmp_path / "model")
    assert refusal(ChatEncoder, beside, "assistant", format) == f"{expected}{tmp_path / 'model'}"


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        (ALPACA, "alpaca"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        (sharegpt(*TALK), "sharegpt"),
        ({**sharegpt(*TALK), "id": 3, "system": "a"}, "sharegpt"),
        ({"prompt": "a", "completion": "b", "instruction": "c"}, "completion"),
    ],
)
def test_auto_knows_the_fields(fields, format):
    assert detect_format(Record("a.jsonl:1", fields, 1), Tally()) == format


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({**ALPACA, "text": "a"}, "alpaca or text"),
        ({**messages(*TALK), **sharegpt(*TALK)}, "messages or sharegpt"),
        ({**sharegpt(*TALK), **ALPACA}, "alpaca or sharegpt"),
        ({**ALPACA, "prompt": "a", "completion": "b"}, "completion or alpaca"),
    ],
)
def test_fields_of_several_formats_are_refused(fields, choices):
    sentence = refusal(detect_format, Record("a.jsonl:1", fields, 1), Tally("skip"))
    assert sentence.startswith("a.jsonl:1 fits several formats") and sentence.endswith(
        f"set data.format={choices}"
    )


def written(path, *records):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(records)), path)
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def prepared(path, home, **values):
    config = DataConfig(train=str(path), context=64, **values)
    return prepare(config, byte_level(), directory=home / "tokenised", batch=2, micro_batch=1, seed=0)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_give_the_rows_of_the_same_chats_as_messages(tmp_path, suffix):
    expected = prepared(written(tmp_path / "m.jsonl", messages(*TALK), messages(*TALK[:2])), tmp_path)
    given = written(tmp_path / f"s.{suffix}", sharegpt(*TALK), sharegpt(*TALK[:2]))
    for format in ("auto", "sharegpt"):
        found = prepared(given, tmp_path / format, format=format)
        assert found.train.rows == expected.train.rows
        for ours, theirs in zip(found.train.step(0), expected.train.step(0), strict=True):
            assert ours.documents == theirs.documents
            for name in ("input_ids_BL", "labels_BL", "position_ids_BL"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), strict=True)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_alpaca_with_history_is_read_from_files(tmp_path, suffix):
    given = written(tmp_path / f"a.{suffix}", {**ALPACA, "history": [["a?", "b."]]}, ALPACA)
    found = prepared(given, tmp_path)
    assert found.parts[0].tally.records == 2 and found.train.trained_tokens > 0


def test_the_estimate_reads_the_fields_of_the_format(tmp_path):
    body = "water " * 200
    talk = [("user", body), ("assistant", body)]
    for number, (fields, characters) in enumerate(
        [
            ({**ALPACA, "output": body}, len(ALPACA["instruction"] + ALPACA["input"] + body)),
            (sharegpt(*talk), len(json.dumps(sharegpt(*talk)["conversations"]))),
            (messages(*talk), len(json.dumps(messages(*talk)["messages"]))),
        ]
    ):
        path = written(tmp_path / f"{number}.jsonl", {**fields, "source": body * 10})
        guessed = estimate(DataConfig(train=str(path), context=4096))
        assert asdict(guessed) == {"documents": 1, "tokens": round(characters / 4), "rows": 1}
    path = written(tmp_path / "both.jsonl", {**ALPACA, "text": body})
    characters = sum(map(len, ALPACA.values()))
    assert estimate(DataConfig(train=str(path), format="alpaca")).tokens == round(characters / 4)
    assert "fits several formats" in refusal(estimate, DataConfig(train=str(path)))
