import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, metaspace

from headrace.data.formats import CompletionEncoder, TextEncoder, detect_format
from headrace.data.sources import Record
from headrace.data.tally import Tally
from headrace.data.tokens import check_tokenizer, frame, identity
from headrace.errors import UserError

BYTES, SPACES = byte_level(), metaspace()


def records(*fields):
    return [Record(f"a.jsonl:{n}", each, 1) for n, each in enumerate(fields, start=1)]


def encoded(encoder, *fields, policy="error"):
    tally = Tally(policy)
    return list(encoder.encode(records(*fields), tally)), tally


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer", [BYTES, SPACES])
def test_text_gets_bos_as_the_tokenizer_does_and_an_eos(tokenizer):
    documents, _ = encoded(TextEncoder(tokenizer), {"text": "the mill"}, {"text": "Größe"})
    for document, text in zip(documents, ["the mill", "Größe"], strict=True):
        assert document.ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert document.trained.all() and document.trained_tokens == len(document.ids) - 1


def test_eos_of_the_tokenizer_is_not_doubled():
    tokenizer = byte_level()
    from tokenizers import processors

    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", eos)]
    )
    before, after = frame(tokenizer)
    assert before.tolist() == [] and after.tolist() == [eos]


def test_blocks_of_one_text_share_one_frame():
    blocks = [
        Record("a.txt:1", {"text": "the mill"}, 1, last=False),
        Record("a.txt:9", {"text": " wheel"}, 1, first=False),
    ]
    documents = list(TextEncoder(SPACES).encode(blocks, Tally()))
    assert documents[0].ids.tolist() == SPACES("the mill")["input_ids"]
    assert documents[1].ids.tolist() == [*plain(SPACES, " wheel"), SPACES.eos_token_id]


@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize("tokenizer", [BYTES, SPACES])
def test_completion_is_what_the_prompt_does_not_explain(tokenizer, loss_on):
    documents, tally = encoded(
        CompletionEncoder(tokenizer, loss_on), {"prompt": "What is it?", "completion": " the mill"}
    )
    prompt = tokenizer("What is it?")["input_ids"]
    whole = [*tokenizer("What is it? the mill")["input_ids"], tokenizer.eos_token_id]
    assert documents[0].ids.tolist() == whole and whole[: len(prompt)] == prompt
    untrained = len(prompt) if loss_on == "completion" else 0
    assert documents[0].trained.tolist() == [n >= untrained for n in range(len(whole))]
    assert tally.shared_borders == 0


def test_token_shared_by_prompt_and_completion_is_trained_and_counted():
    documents, tally = encoded(
        CompletionEncoder(BYTES, "completion"), {"prompt": "It is ", "completion": "the mill"}
    )
    trained = documents[0].ids[documents[0].trained]
    assert BYTES.decode(trained) == " the mill<|im_end|>"
    assert tally.shared_borders == 1
    assert tally.remarks(9) == [
        "1 record trained from a token that begins in the prompt (end prompts without a space)"
    ]


words = st.text(st.sampled_from("the mil wh?\n ö水\t"), max_size=12)


@given(words, words)
def test_prompt_is_the_longest_common_beginning_and_no_character_is_lost(prompt, completion):
    documents, _ = encoded(
        CompletionEncoder(BYTES, "completion"), {"prompt": prompt, "completion": completion}
    )
    ids, trained = documents[0].ids.tolist(), documents[0].trained.tolist()
    alone, whole = plain(BYTES, prompt), plain(BYTES, prompt + completion)
    border = trained.index(True)
    assert ids == [*whole, BYTES.eos_token_id] and trained == sorted(trained)
    assert ids[:border] == alone[:border] and (border == len(alone) or ids[border] != alone[border])
    assert BYTES.decode(ids[border:]).endswith(completion + "<|im_end|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a"}, r"a\.jsonl:1 has no field 'completion' but 'prompt'"),
        ({"prompt": None, "completion": "b"}, r"a\.jsonl:1 has no text in 'prompt' but null"),
        ({"prompt": "a", "completion": ["b"]}, r"a\.jsonl:1 has no text in 'completion' but list"),
        ({"prompt": "a", "completion": "\ud800"}, r"a\.jsonl:1 has half of a surrogate pair in 'completion'"),
    ],
)
def test_flawed_completion_is_named_or_skipped(fields, message):
    encoder = CompletionEncoder(BYTES, "completion")
    with pytest.raises(UserError, match=message):
        encoded(encoder, fields)
    documents, tally = encoded(encoder, fields, {"prompt": "a", "completion": "b"}, policy="skip")
    assert [d.record.place for d in documents] == ["a.jsonl:2"] and tally.skipped == 1


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_text_is_named(text):
    with pytest.raises(UserError, match=r"a\.jsonl:1 has an empty 'text'"):
        encoded(TextEncoder(BYTES), {"text": text})


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ({"text": 1, "id": 2}, "text"),
        ({"prompt": 1, "completion": 2}, "completion"),
        ({"messages": []}, "messages"),
    ],
)
def test_format_is_detected(fields, format):
    assert detect_format(*records(fields), Tally()) == format


def test_undetectable_formats():
    with pytest.raises(UserError, match=r"a\.jsonl:1 has the fields 'prompt', 'x' where text, or prompt and"):
        detect_format(*records({"prompt": 1, "x": 2}), Tally())
    with pytest.raises(
        UserError, match=r"fits several formats \('text', 'messages'\); set data\.format=messages or"
    ):
        detect_format(*records({"text": 1, "messages": 2}), Tally("skip"))
    assert detect_format(*records({}), tally := Tally("skip")) is None and tally.skipped == 1


def test_parts_of_a_document():
    document = encoded(CompletionEncoder(BYTES, "completion"), {"prompt": "ab", "completion": "cd"})[0][0]
    parts = [document.part(start, start + 2) for start in range(0, len(document.ids), 2)]
    assert np.array_equal(np.concatenate([p.ids for p in parts]), document.ids)
    assert np.array_equal(np.concatenate([p.trained for p in parts]), document.trained)


def test_unusable_tokenizers_are_refused():
    tokenizer = byte_level()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no eos_token"):
        check_tokenizer(tokenizer)


def test_identity_changes_with_what_decides_the_ids_and_with_nothing_else():
    tokenizer = byte_level()
    first = identity(tokenizer)
    tokenizer(["a", "a long text"], padding=False, truncation=True, max_length=3)
    assert identity(tokenizer) == first == identity(byte_level())
    assert identity(metaspace()) != first != identity(byte_level(template=None))
    tokenizer.add_tokens(["mill"])
    assert identity(tokenizer) != first
