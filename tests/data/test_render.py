"""Rows as people read them are what the model gets: every character, every label, every border."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import SENTENCES, byte_level, metaspace

from headrace.data.batch import collate
from headrace.data.render import Page, Piece, render
from headrace.data.tokens import encode

TOKENIZERS = {"byte-level": byte_level(), "metaspace": metaspace()}


def document(tokenizer, text, mask):
    (ids,) = encode(tokenizer, [text])
    return ids, np.resize(np.asarray(mask, dtype=np.bool_), len(ids))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_put_together_are_the_text_and_their_marks_the_labels(name, data):
    tokenizer = TOKENIZERS[name]
    texts = data.draw(st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=3))
    masks = [data.draw(st.lists(st.booleans(), min_size=1, max_size=9)) for _ in texts]
    row = [document(tokenizer, *pair) for pair in zip(texts, masks, strict=True)]
    batch = collate([row], 4096)
    (pages,) = render(batch, tokenizer)
    assert sum(page.trained for page in pages) == batch.valid_tokens
    for page, (ids, trained), text in zip(pages, row, texts, strict=True):
        assert (page.tokens, page.trained) == (len(ids), int(trained[1:].sum()))
        assert not page.pieces[0].trained, "nothing stands before the first token"
        assert all(a.trained != b.trained for a, b in zip(page.pieces, page.pieces[1:], strict=False))
        whole = "".join(piece.text for piece in page.pieces)
        if all(text.isascii() for text in texts):  # a letter of several tokens may be divided
            assert whole == tokenizer.decode(ids) and whole.strip() == text.strip()


def test_rows_and_documents_are_kept_apart():
    tokenizer = TOKENIZERS["byte-level"]
    one, two = (document(tokenizer, text, [True]) for text in ("The mill", " wheel"))
    pages = render(collate([[one, two], [two]], 4096), tokenizer)
    assert [[page.tokens for page in row] for row in pages] == [[len(one[0]), len(two[0])], [len(two[0])]]


def test_special_tokens_are_shown_and_an_untrained_document_is_one_piece():
    tokenizer = TOKENIZERS["byte-level"]
    row = [document(tokenizer, "<|im_start|>user\nmill<|im_end|>", [False])]
    ((page,),) = render(collate([row], 4096), tokenizer)
    assert page == Page(len(row[0][0]), 0, (Piece("<|im_start|>user\nmill<|im_end|>", False),))


def test_what_a_terminal_would_obey_is_written_out():
    row = [document(TOKENIZERS["byte-level"], "a\x1b[2Jb\tc\nd\x07\x9b", [False])]
    ((page,),) = render(collate([row], 4096), TOKENIZERS["byte-level"])
    assert page.pieces[0].text == "a\\x1b[2Jb\tc\nd\\x07\\x9b"
