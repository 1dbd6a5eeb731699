"""What the plan knows of streamed weights, held against the model's own."""

from dataclasses import replace

import pytest
import torch
from tiny_configs import CONFIGS, config_of
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.machine.machine import Machine
from headrace.models import boundaries, homes, rows
from headrace.planner import streamed
from headrace.planner.fit import judge
from headrace.planner.memory import predict
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload
from headrace.schedule.action import Kind

PLAIN = Machine("plain", 2, {"ram": 2**40})
CARD = Machine("card", 2, {"device": 2**40, "host": 2**40})
WORK = Workload(24, 2, 3, loss_chunk=16, bucket=2**16, paths=(1.0, 2.0), weights="disk")


def test_constants_are_those_of_the_code_that_they_describe():
    assert streamed.SLOTS == boundaries.SLOTS
    assert streamed.ROW_SLOTS == rows.SLOTS


@pytest.mark.parametrize("name", CONFIGS)
def test_buckets_are_those_of_the_model(name):
    config = config_of(name)
    shape = ModelShape.from_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.tie_weights()
    ours, theirs = streamed.streamed_layout(shape, WORK), homes.streamed_layout(model, WORK.bucket)
    assert [p.name for p in ours.parameters] == [p.name for p in theirs.parameters]
    assert ours == theirs


def test_every_tier_has_its_share():
    shape = ModelShape.from_config(config_of("llama tied", num_hidden_layers=9))
    on_device = predict(shape, replace(WORK, weights="device"), CARD)
    for where in ("host", "disk"):
        ledger = predict(shape, replace(WORK, weights=where), CARD)
        home = streamed.home_bytes(shape, WORK)
        assert ledger.peaks[where]["weights"] == home
        saved = on_device.peaks["device"]["weights"] - ledger.peaks["device"]["weights"]
        slots = streamed.slot_bytes(shape, WORK)
        assert saved == 2 * (shape.numel - streamed.resident_numel(shape, WORK)) - slots > 0
        assert ledger.lane_bytes("h2d") > on_device.lane_bytes("h2d")


def test_bytes_by_hand():
    """Two of nine layers fit: 9 + 5 x 7 fetches of a layer, and one of the tied embedding a step."""
    shape = ModelShape.from_config(config_of("llama tied", num_hidden_layers=9))
    layout = streamed.streamed_layout(shape, WORK)
    layer = sum(b.size for b in layout.buckets if str(b.unit) == "l0")
    end = sum(b.size for b in layout.buckets if str(b.unit) == "e0")
    ledger = predict(shape, WORK, PLAIN)
    moved = {
        kind: sum(account.nbytes for action, account in ledger.actions.items() if action.kind is kind)
        for kind in (Kind.READ, Kind.WRITE)
    }
    assert moved[Kind.READ] == 2 * (layer * (9 + 5 * 7) + end)
    assert moved[Kind.WRITE] == 2 * layout.size


def test_inputs_of_layers_by_hand():
    shape = ModelShape.from_config(config_of("llama tied", num_hidden_layers=9))
    work = replace(WORK, weights="device", activations="disk")
    one = work.tokens * shape.hidden * 2
    ledger, kept = predict(shape, work, PLAIN), predict(shape, replace(work, activations="recompute"), PLAIN)
    assert ledger.peaks["disk"] == {"activations": 7 * one}
    assert ledger.lane_bytes("d2h") - kept.lane_bytes("d2h") == 3 * 9 * one
    assert sum(ledger.lane_bytes(f"write:p{path}") for path in (0, 1)) == 3 * 7 * one
    assert kept.peaks["ram"]["activations"] - ledger.peaks["ram"]["activations"] >= 8 * one
    assert judge(shape, work, PLAIN).fits
