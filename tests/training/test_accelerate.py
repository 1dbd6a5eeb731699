"""OffloadedAdamW under accelerate: its states stay in the host buffers, bit for bit."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from torch import nn

from headrace import OffloadedAdamW

BLOCK = 2**16
SIZES = [(300, 250), (7,), (64, 48)]


@pytest.fixture
def trained():
    """A bf16 optimizer after three steps, whose master weights hold more than the working weights."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size).bfloat16()) for size in SIZES]
    optimizer = OffloadedAdamW(parameters, lr=1e-4, bucket=BLOCK, workers=2)
    take_steps(optimizer, 3)
    yield optimizer
    optimizer.close()


def take_steps(optimizer, count):
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()
        optimizer.zero_grad()


def buffers(optimizer):
    return {(t, n): optimizer.pieces(t, n) for t in optimizer.tables for n in optimizer.names}


def addresses(optimizer):
    return {key: [piece.data_ptr() for piece in pieces] for key, pieces in buffers(optimizer).items()}


def values(optimizer):
    return {key: torch.cat(pieces) for key, pieces in buffers(optimizer).items()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor, two[key]), key


def test_what_accelerate_moves_to_a_device_holds_no_states(trained):
    """The meta device stands for an accelerator: what is moved there has lost its values."""
    moved = move_to_device(trained.state_dict(), torch.device("meta"))
    before, places = values(trained), addresses(trained)
    assert all(tensor.device.type == "cpu" for state in moved["state"].values() for tensor in state.values())
    trained.load_state_dict(moved)
    assert_same(values(trained), before)
    assert addresses(trained) == places


def test_prepare_leaves_states_where_and_what_they_are(trained):
    before, places, peak = values(trained), addresses(trained), trained.host.held
    working = [p.detach().clone() for group in trained.param_groups for p in group["params"]]
    assert any(not torch.equal(b.bfloat16().float(), b) for (t, _), b in before.items() if t == "master")
    prepared = Accelerator(cpu=True).prepare(trained)
    assert type(prepared) is AcceleratedOptimizer and prepared.device_placement
    assert prepared.optimizer is trained and trained.host.held == peak
    assert_same(values(trained), before)
    assert addresses(trained) == places
    for group in trained.param_groups:
        assert all(torch.equal(p, w) for p, w in zip(group["params"], working, strict=True))


def test_prepared_or_not_it_trains_to_the_same_bits(trained):
    torch.manual_seed(0)
    plain = OffloadedAdamW(
        [nn.Parameter(torch.randn(size).bfloat16()) for size in SIZES], lr=1e-4, bucket=BLOCK, workers=2
    )
    take_steps(plain, 3)
    prepared = Accelerator(cpu=True).prepare(trained)
    take_steps(prepared, 2)
    take_steps(plain, 2)
    assert_same(values(trained), values(plain))
    plain.close()


@pytest.mark.parametrize("way", ["own", "copied", "saved"])
def test_states_come_back_as_they_went(trained, tmp_path, way):
    """As they are, copied, and from a file that torch reads without trusting it."""
    state, before = trained.state_dict(), values(trained)
    if way == "copied":
        state = copy.deepcopy(state)
    elif way == "saved":
        torch.save(state, tmp_path / "optimizer.pt")
        state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    if way != "own":
        take_steps(trained, 1)
    trained.load_state_dict(state)
    assert_same(values(trained), before)


def test_torchs_own_adamw_can_load_the_states(trained):
    parameters = [nn.Parameter(p.detach().float()) for g in trained.param_groups for p in g["params"]]
    reference = torch.optim.AdamW(parameters, lr=1.0, fused=True)
    reference.load_state_dict(trained.state_dict())
    assert reference.param_groups[0]["lr"] == 1e-4
    for name, parameter in zip(trained.names, parameters, strict=True):
        assert torch.equal(
            reference.state[parameter]["exp_avg"].flatten(), torch.cat(trained.pieces("exp_avg", name))
        )
