"""Streamed weights change no bit: held against the same model with all of its weights in memory."""

import gc
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_session import BUCKET, CPU, FAMILIES, Session, assert_equal, saved, tiny_config

from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.memory.disk import DiskPath
from headrace.memory.tiers import Tiers
from headrace.models.homes import move_out, streamed_layout, weight_store
from headrace.models.load import load_model
from headrace.models.save import model_entries, save_model
from headrace.models.streaming import Streamed
from headrace.schedule.action import Kind


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_the_same_bit_by_bit(tmp_path, family, where):
    source = saved(tiny_config(family), tmp_path)
    with Session(source, "device", tmp_path) as plain:
        losses = plain.train(2)
        expected = plain.weights()
    with Session(source, where, tmp_path) as session:
        assert session.train(2) == losses
        assert_equal(session.weights(), expected)


@settings(max_examples=12, deadline=None)
@given(
    paths=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    ahead=st.integers(0, 4),
    apart=st.booleans(),
    where=st.sampled_from(["host", "disk"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    gradients=st.sampled_from(["host", "disk"]),
)
def test_neither_tiers_nor_slots_nor_paths_change_a_bit(
    tmp_path_factory, paths, micro_batches, ahead, apart, where, dtype, gradients
):
    tmp = tmp_path_factory.mktemp("streamed")
    source = saved(tiny_config("llama"), tmp)
    settings_ = {"micro_batches": micro_batches, "dtype": dtype}
    with Session(source, "device", tmp, **settings_) as plain:
        losses = plain.train(2, micro_batches)
        expected = plain.weights()
    settings_ |= {"gradients": gradients, **({"accelerator": 2**26} if apart else {})}
    with Session(source, where, tmp, paths=paths, ahead=ahead, **settings_) as session:
        assert session.train(2, micro_batches) == losses
        assert_equal(session.weights(), expected)
    assert not [path for path in tmp.glob("p*/*") if path.is_file()]


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_those_of_the_whole_model(tmp_path, family, where):
    tiny_config(family).save_pretrained(tmp_path)
    state = torch.get_rng_state()
    plain = load_model(tmp_path / "config.json", seed=4).model
    with ExitStack() as resources:
        disk = [DiskPath(tmp_path / "p")] if where == "disk" else ()
        tiers = Tiers(CPU, Ledger(), disk=disk, workers=1)
        resources.callback(tiers.close)
        loaded = load_model(
            tmp_path / "config.json", seed=4, home=lambda model: weight_store(model, tiers, where, BUCKET)
        )
        resources.callback(loaded.store.close)
        streamed = Streamed(loaded.model, loaded.store, tiers)
        resources.callback(streamed.close)
        for name, parameter in plain.named_parameters():
            other = loaded.model.get_parameter(name)
            pieces = streamed.pieces(name, 0, parameter.numel())
            whole = other if pieces is None else torch.cat([p.clone() for p in pieces]).view(other.shape)
            assert torch.equal(whole, parameter), name
        ids = torch.arange(12)[None]
        with torch.no_grad():
            assert torch.equal(loaded.model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_saved_model_is_written_tensor_by_tensor(tmp_path):
    source = saved(tiny_config("qwen3-moe"), tmp_path)
    with Session(source, "disk", tmp_path) as session:
        session.train(1)
        expected = session.weights()
        entries = model_entries(session.model, pieces=session.streamed.pieces)
        save_model(tmp_path / "out", entries, session.model.config)
    again = load_model(tmp_path / "out").model
    assert_equal({name: p.detach() for name, p in again.named_parameters()}, expected)


def test_text_is_generated_as_without_streaming(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    with Session(source, "device", tmp_path) as plain, Session(source, "disk", tmp_path) as session:
        ids = torch.arange(5)[None]
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        for model in (plain.model, session.model):
            model.eval().set_attn_implementation("sdpa")
        assert torch.equal(session.model.generate(ids, **options), plain.model.generate(ids, **options))


def test_bytes_are_what_the_formula_says(tmp_path):
    """Of n layers, s of them on the device: n + (2 m - 1)(n - s) fetches a step of m micro-batches."""
    config = tiny_config("llama", num_hidden_layers=5)
    source = saved(config, tmp_path)
    steps, micro_batches, ahead = 3, 2, 1
    for where, kind in (("host", Kind.UP), ("disk", Kind.READ)):
        with Session(source, where, tmp_path, micro_batches=micro_batches, ahead=ahead) as session:
            layout = streamed_layout(session.model, BUCKET)
            layer = 2 * sum(b.size for b in layout.buckets if str(b.unit) == "l0")
            session.train(steps, micro_batches)
            layers = sum(n for name, n in session.moved(kind).items() if ".l" in name)
            assert layers == steps * layer * (5 + (2 * micro_batches - 1) * (5 - 1 - ahead))
            ends = sum(n for name, n in session.moved(kind).items() if ".e" in name)
            both = 2 * sum(b.size for b in layout.buckets if b.unit.kind == "e")
            assert ends == steps * micro_batches * both
            written = sum(n for name, n in session.moved(Kind.WRITE).items() if ".w" in name)
            assert written == (steps * 2 * layout.size if where == "disk" else 0)


def test_the_device_holds_no_more_than_its_budget(tmp_path):
    source = saved(tiny_config("llama", num_hidden_layers=6), tmp_path)
    with Session(source, "host", tmp_path, accelerator=2**26) as session:
        session.train(1)
        held = session.ledger.peaks["device"]["weights"]
        layout = streamed_layout(session.model, BUCKET)
        sizes = {u: 2 * sum(b.size for b in layout.of_unit(u)) for u in {b.unit for b in layout.buckets}}
        assert held == 2 * max(n for u, n in sizes.items() if u.kind == "l") + max(
            n for u, n in sizes.items() if u.kind == "e"
        )
        assert held < sum(sizes.values()) / 2
    with pytest.raises(UserError, match=r"weights on the device .*raise memory\.device"):
        Session(source, "host", tmp_path, accelerator=held - 1)


def test_a_paced_link_is_kept_busy_and_waited_for(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    with Session(source, "host", tmp_path, accelerator=2**26, links={"h2d": 20e6}) as session:
        session.train(1)
        moved = [(a.nbytes, a.seconds) for k, a in session.ledger.actions.items() if k.lane == "h2d"]
        assert all(seconds >= nbytes / 20e6 for nbytes, seconds in moved)
        assert session.ledger.stalls["h2d"] > 0


def test_a_forward_with_gradients_must_be_recomputed(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    with Session(source, "host", tmp_path) as session:
        session.model.eval()
        with pytest.raises(
            UserError, match=r"is not recomputed in backward: .*memory\.activations=recompute"
        ):
            session.loss(torch.zeros(1, 4, dtype=torch.long))


def test_evaluation_between_steps_sees_the_weights_of_its_step(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    ids = torch.arange(20).view(2, 10)
    outcomes = []
    for where in ("device", "disk"):
        with Session(source, where, tmp_path) as session:
            found = []
            for _ in range(3):
                session.train(1)
                session.model.eval()
                with torch.no_grad():
                    found.append(session.loss(ids).item())
                session.model.train()
            outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) == 3


def test_moving_a_model_out_frees_its_memory(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    model = load_model(source).model
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    tiers = Tiers(CPU, Ledger(), workers=1)
    store = weight_store(model, tiers, "host", BUCKET)
    move_out(model, store)
    gc.collect()
    streamed = Streamed(model, store, tiers)
    names = [p.name for p in store.layout.parameters]
    assert all(model.get_parameter(n).untyped_storage().nbytes() <= 4 for n in names)
    for name in names:
        pieces = torch.cat(list(streamed.pieces(name, 0, expected[name].numel())))
        assert torch.equal(pieces.view(expected[name].shape), expected[name])
    streamed.close(), store.close(), tiers.close()


def test_a_gguf_file_is_refused(tmp_path):
    path = Path(tmp_path / "model.gguf")
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError):
        load_model(path, home=lambda model: None)
