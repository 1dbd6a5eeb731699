"""A run on a CUDA device: two tiers, links equal to the plan, resumed exactly where it stopped."""

import json

import pytest
import torch

from headrace.ledger import Ledger
from headrace.run.train import train


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def out(run_file):
    return run_file.with_suffix("")


def losses(run_file):
    lines = (out(run_file) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_links_move_what_the_plan_says(write_run):
    run_file = write_run("run")
    train(run_file)
    both = json.loads((out(run_file) / "ledger.json").read_text(encoding="utf-8"))
    predicted, measured = Ledger.from_json(both["predicted"]), Ledger.from_json(both["measured"])
    assert {"device", "host"} <= set(measured.peaks)
    for lane in ("d2h", "h2d"):
        assert measured.lane_bytes(lane) == measured.steps * predicted.lane_bytes(lane)


def test_a_run_goes_on_where_it_stopped(write_run):
    whole, parts = (
        write_run("whole", optim__schedule="constant"),
        write_run("parts", optim__schedule="constant"),
    )
    train(whole)
    train(parts, ["train.steps=4"])
    train(parts)
    assert losses(parts) == losses(whole)
