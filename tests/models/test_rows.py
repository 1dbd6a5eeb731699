"""Embeddings by rows: lookups bit by bit those of the whole, and never the whole of it on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_session import Session, assert_equal, saved, tiny_config

from headrace.errors import UserError
from headrace.training.forward import output_head


def rows_of_memory(weight, sizes):
    """Pieces of a weight that is in memory, of the given numbers of rows in turn."""

    def pieces():
        start = 0
        for size in sizes:
            yield start, weight.detach()[start : start + size]
            start += size

    return pieces


class Whole(Session):
    """The same loss by rows, with all weights in memory."""

    def loss(self, ids):
        self.rows = rows_of_memory(output_head(self.model).weight_VD, self.sizes)
        return super().loss(ids)


def piece_sizes(session):
    """How many rows the pieces of a session's output embedding have."""
    return [len(rows) for _, rows in session.rows()]


def check(source, where, tmp, steps=2, micro_batches=1, dtype=torch.bfloat16, **options):
    common = {"micro_batches": micro_batches, "dtype": dtype}
    with Session(source, where, tmp, by_rows=True, **common, **options) as session:
        sizes = piece_sizes(session)
        losses = session.train(steps, micro_batches)
        found = session.weights()
    with Whole(source, "device", tmp, **common) as plain:
        plain.sizes = sizes
        assert plain.train(steps, micro_batches) == losses
        assert_equal(plain.weights(), found)


@settings(max_examples=12, deadline=None)
@given(
    where=st.sampled_from(["host", "disk"]),
    tied=st.booleans(),
    hidden=st.sampled_from([32, 40, 72]),
    paths=st.integers(1, 2),
    apart=st.booleans(),
    micro_batches=st.integers(1, 2),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_training_is_that_of_weights_in_memory(
    tmp_path_factory, where, tied, hidden, paths, apart, micro_batches, dtype
):
    tmp = tmp_path_factory.mktemp("rows")
    shape = {"hidden_size": hidden, "vocab_size": 2311, "tie_word_embeddings": tied}
    source = saved(tiny_config("llama", **shape), tmp)
    device = {"accelerator": 2**26} if apart else {}
    check(source, where, tmp, paths=paths, micro_batches=micro_batches, dtype=dtype, **device)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "phi3", "mixtral"])
def test_families(tmp_path, family):
    check(saved(tiny_config(family), tmp_path), "disk", tmp_path)


def test_rows_are_cut_between_buckets(tmp_path):
    source = saved(tiny_config("llama", hidden_size=40, vocab_size=4000), tmp_path)
    with Session(source, "disk", tmp_path, by_rows=True) as session:
        sizes = piece_sizes(session)
        assert sum(sizes) == 4000 and sizes.count(1) >= 2
        assert max(sizes) * 40 <= 2**16


def test_generated_text_is_that_of_the_whole(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    ids, options = torch.arange(5)[None], {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = []
    for where, by_rows in (("device", False), ("disk", True)):
        with Session(source, where, tmp_path, by_rows=by_rows) as session:
            session.model.eval().set_attn_implementation("sdpa")
            found.append(session.model.generate(ids, **options))
    assert torch.equal(*found)


def test_logits_with_gradients_are_refused(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    with (
        Session(source, "disk", tmp_path, by_rows=True) as session,
        pytest.raises(UserError, match=r"comes by rows, .*memory\.embeddings=whole"),
    ):
        session.model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_the_device_never_holds_an_embedding(tmp_path):
    source = saved(tiny_config("llama", vocab_size=40_000), tmp_path)
    peaks = {}
    for by_rows in (False, True):
        with Session(source, "disk", tmp_path, by_rows=by_rows, accelerator=2**30) as session:
            session.train(1)
            peaks[by_rows] = session.ledger.peaks["device"]["weights"]
    assert peaks[True] < peaks[False] / 4
