"""Data that cannot be used as it is: refused in one sentence, or left out by the switch, never silently."""

import json
import os
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizers import PLAIN, SMOLLM, byte_level
from tokenizers import AddedToken

from headrace.data.chat import ChatEncoder
from headrace.data.config import DataConfig
from headrace.data.estimate import estimate
from headrace.data.prepare import prepare
from headrace.data.sources import Record, find_sources, read_records
from headrace.data.tally import Tally
from headrace.errors import UserError

CHAT = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A channel."}]
CALL = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]


def refusal(act, *arguments, **options):
    """The sentence with which a user's mistake is refused."""
    with pytest.raises(UserError) as caught:
        act(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def encode(template, *records, policy="error"):
    """Chats as they come out, and the tally; a record is its fields."""
    encoder, tally = ChatEncoder(byte_level(template), "assistant"), Tally(policy)
    given = [Record(f"a.jsonl:{n}", fields, 1) for n, fields in enumerate(records, start=1)]
    return list(encoder.encode(given, tally)), tally


def check_refused_or_skipped(template, fields, message):
    """The flaw is an error that names the record, and with the switch a counted skip beside a good record."""
    sentence = refusal(encode, template, fields)
    assert f"a.jsonl:1 {message}" in sentence and "data.bad_records=skip" in sentence
    documents, tally = encode(template, fields, {"messages": CHAT}, policy="skip")
    assert [document.record.place for document in documents] == ["a.jsonl:2"] and tally.skipped == 1


@pytest.mark.parametrize(
    ("name", "value"), [("tool_calls", CALL), ("function_call", {"name": "look", "arguments": "{}"})]
)
def test_a_call_of_a_tool_is_never_dropped(name, value):
    called = {"role": "assistant", "content": "", name: value}
    fields = {"messages": [CHAT[0], called, {"role": "tool", "content": "42"}, CHAT[1]]}
    check_refused_or_skipped(SMOLLM, fields, f"has '{name}' in message 2, which are not supported")


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_offered_tools_are_never_dropped(name):
    fields = {"messages": CHAT, name: CALL}
    check_refused_or_skipped(SMOLLM, fields, f"has '{name}', which are not supported")


def test_empty_tool_fields_as_parquet_has_them_are_none():
    messages = [{**message, "tool_calls": None, "function_call": None} for message in CHAT]
    documents, _ = encode(SMOLLM, {"messages": messages, "tools": None, "functions": []})
    assert len(documents) == 1


ONLY_KNOWN = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("role", ["robot", "tool", "developer", "ipython"])
def test_the_template_judges_uncommon_roles(role):
    fields = {"messages": [{"role": role, "content": "I am here."}, *CHAT]}
    for template in (SMOLLM, PLAIN):
        assert len(encode(template, fields)[0]) == 1
    message = f"has a message 1 that the chat template leaves out; its role is '{role}'"
    check_refused_or_skipped(ONLY_KNOWN, fields, message)


FAILING = {
    "raise": ("{{ raise_exception('no rivers') }}", "no rivers"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "missing": ("{{ messages[7].content.x }}", "has no element 7"),
    "types": ("{{ 'a' + 1 }}", "can only concatenate str"),
    "range": ("{% for i in range(10**12) %}x{% endfor %}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize("failure", FAILING)
def test_a_template_that_fails_on_a_chat_refuses_that_chat(failure):
    statement, reason = FAILING[failure]
    template = "{% if 'river' in messages[0].content %}" + statement + "{% endif %}" + SMOLLM
    fields = {"messages": [{"role": "user", "content": "river"}, CHAT[1]]}
    check_refused_or_skipped(template, fields, "is refused by the chat template (")
    assert reason in refusal(encode, template, fields)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_template_that_is_no_template_ends_the_run_whatever_the_switch(policy):
    sentence = refusal(encode, "{% for m in messages %}\n{{ m. }}", {"messages": CHAT}, policy=policy)
    assert "line 2 of the tokenizer's chat template is no valid Jinja" in sentence


def test_several_templates_without_a_default():
    tokenizer = byte_level()
    tokenizer.chat_template = {"tools": SMOLLM, "thinking": SMOLLM}
    assert "chat template cannot be used" in refusal(ChatEncoder, tokenizer, "assistant")


def lines(path, *values):
    path.write_text(
        "".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)
    )
    return str(path)


@pytest.mark.parametrize("digits", [4300, 4301, 50_000])
def test_a_number_of_any_length_is_read_or_refused(tmp_path, digits):
    path = lines(tmp_path / "a.jsonl", '{"text": "a", "n": %s}' % ("9" * digits), {"text": "b"})
    tally = Tally("skip")
    records = list(read_records(find_sources(path, "data.train"), tally))
    assert len(records) + tally.skipped == 2
    assert tally.skipped == (digits > 4300)
    if digits > 4300:
        assert "a.jsonl:1 holds a number of too many digits" in tally.first_skipped


def test_values_of_every_kind_in_messages_are_counted_before_they_are_refused(tmp_path):
    odd = pa.array([[{"role": "user", "content": "a", "at": 0}]])
    odd = pa.array(odd.to_pylist(), pa.list_(pa.struct({"role": pa.string(), "at": pa.timestamp("s")})))
    pq.write_table(pa.table({"messages": odd}), tmp_path / "a.parquet")
    assert estimate(DataConfig(train=str(tmp_path / "a.parquet"))).documents == 1


@pytest.mark.parametrize("second", ["a.jsonl", "./a.jsonl", ".", "link.jsonl", "sub/../a.jsonl"])
def test_a_file_that_is_named_twice_is_refused(tmp_path, monkeypatch, second):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", {"text": "a"})
    (tmp_path / "sub").mkdir()
    if second == "link.jsonl":
        (tmp_path / second).symlink_to("a.jsonl")
    sentence = refusal(find_sources, ["a.jsonl", second], "data.train")
    assert sentence.startswith("data.train names ") and "would count twice" in sentence
    assert len(find_sources("a.jsonl", "data.train").files) == 1


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody-of-this-name/a.jsonl", "x" * 5000 + "/a.jsonl"])
def test_a_path_that_cannot_be_is_refused(path):
    assert f"data.eval: {path[:200]} cannot be read" in refusal(find_sources, path, "data.eval")


def test_a_directory_that_cannot_be_searched_is_named(tmp_path):
    home = tmp_path / "data"
    closed = home / "inner"
    closed.mkdir(parents=True)
    lines(home / "a.jsonl", {"text": "a"})
    with as_nobody(tmp_path, home, closed):
        closed.chmod(0)
        for given, key in ((home, "data.train"), ([str(home)], "data.eval")):
            sentence = refusal(find_sources, given if isinstance(given, list) else str(given), key)
            assert f"{key}: {closed} cannot be read (Permission denied)" in sentence
        closed.rename(home / ".inner")
        assert [path.name for path in find_sources(str(home), "data.train").files] == ["a.jsonl"]
        (home / ".inner").chmod(0o700)


@contextmanager
def as_nobody(root, *places):
    """Give ``places`` to a user without privileges and be that user, where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    opened = [(place, place.stat().st_mode & 0o7777) for place in (root, *root.parents)]
    opened = [(place, mode) for place, mode in opened if mode & 0o005 != 0o005]
    for place, _ in opened:
        place.chmod(0o755)
    for place in places:
        os.chown(place, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for place, mode in opened:
            place.chmod(mode)


def wide_tokenizer():
    """A tokenizer with an added token of a far higher id than all others."""
    tokenizer = byte_level()
    rows = max(tokenizer.get_vocab().values()) + 1
    tokenizer.add_tokens([AddedToken("<|picture|>", special=True)], special_tokens=True)
    return tokenizer, rows


@pytest.mark.parametrize("text", ["the mill <|picture|> wheel", "the mill wheel"])
def test_a_token_without_a_row_is_refused_before_training(tmp_path, text):
    tokenizer, rows = wide_tokenizer()
    config = DataConfig(train=lines(tmp_path / "a.jsonl", {"text": "the mill"}, {"text": text}), context=16)
    options = {"directory": tmp_path / "data", "batch": 1, "micro_batch": 1, "seed": 0}
    if "picture" not in text:
        prepare(config, tokenizer, vocabulary=rows, **options)
        return
    for _ in range(2):  # what was tokenised stays, and is looked at again
        sentence = refusal(prepare, config, tokenizer, vocabulary=rows, **options)
        assert (
            f"data.train has the token '<|picture|>' of id {rows}, but the model only {rows:,} rows"
            in sentence
        )
    prepare(config, tokenizer, vocabulary=rows + 1, **options)
