"""Layer inputs that leave the device come back bit by bit, and leave no copy behind."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_session import Session, assert_equal, saved, tiny_config

from headrace.errors import UserError
from headrace.models.boundaries import SLOTS
from headrace.schedule.action import Kind


@settings(max_examples=14, deadline=None)
@given(
    weights=st.sampled_from(["device", "host", "disk"]),
    activations=st.sampled_from(["host", "disk"]),
    layers=st.integers(1, 5),
    micro_batches=st.integers(1, 2),
    paths=st.integers(1, 2),
    apart=st.booleans(),
)
def test_inputs_that_leave_change_no_bit(
    tmp_path_factory, weights, activations, layers, micro_batches, paths, apart
):
    tmp = tmp_path_factory.mktemp("boundaries")
    source = saved(tiny_config("llama", num_hidden_layers=layers), tmp)
    with Session(source, "device", tmp, micro_batches=micro_batches) as plain:
        losses = plain.train(2, micro_batches)
        expected = plain.weights()
    options = {"paths": paths, "micro_batches": micro_batches, "activations": activations}
    options |= {"accelerator": 2**26} if apart else {}
    with Session(source, weights, tmp, **options) as session:
        assert session.train(2, micro_batches) == losses
        assert_equal(session.weights(), expected)
    assert not [path for path in tmp.glob("p*/*") if path.is_file()]


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3-moe", "phi3"])
def test_families(tmp_path, family):
    source = saved(
        tiny_config(family, **({"n_layer": 5} if family == "gpt2" else {"num_hidden_layers": 5})), tmp_path
    )
    with Session(source, "device", tmp_path) as plain:
        losses = plain.train(2)
        expected = plain.weights()
    with Session(source, "disk", tmp_path, activations="disk") as session:
        assert session.train(2) == losses
        assert_equal(session.weights(), expected)


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_bytes_are_those_of_all_inputs_but_the_last(tmp_path, layers):
    source = saved(tiny_config("llama", num_hidden_layers=layers), tmp_path)
    with Session(source, "device", tmp_path, activations="disk") as session:
        session.train(3)
        actions = session.ledger.actions.items()
        moved = {
            kind: sum(a.nbytes for k, a in actions if k.kind is kind and k.unit and k.unit.kind == "a")
            for kind in (Kind.DOWN, Kind.READ, Kind.WRITE)
        }
        one = session.boundary_bytes
        assert moved[Kind.DOWN] == 3 * layers * one
        assert moved[Kind.READ] == moved[Kind.WRITE] == 3 * max(0, layers - SLOTS) * one
        assert session.ledger.peaks["ram"]["buffers"] >= min(SLOTS, layers) * one


def test_an_input_is_freed_once_it_has_left(tmp_path):
    source = saved(tiny_config("llama", num_hidden_layers=6), tmp_path)
    with Session(source, "device", tmp_path, activations="disk") as session:
        inputs = []
        layer = session.model.model.layers[1]
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
        loss = session.loss(torch.zeros(2, 25, dtype=torch.long))
        session.settle()
        assert [reference() for reference in inputs] == [None]
        loss.backward()


def test_a_budget_without_room_is_refused(tmp_path):
    source = saved(tiny_config("llama"), tmp_path)
    with pytest.raises(
        UserError, match=r"inputs of layers \(memory\.activations\) needs .*raise memory\.host"
    ):
        Session(source, "device", tmp_path, activations="host", accelerator=2**26, host=2**10)
