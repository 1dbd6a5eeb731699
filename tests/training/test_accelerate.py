"""OffloadedAdamW under accelerate: its states stay in the host buffers, bit for bit."""

import copy

import law_one
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headrace import OffloadedAdamW

ACCUMULATION, CLIP = 2, 0.1
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
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


def loop(model, optimizer, clip):
    """A loop as accelerate's manual has it, over accumulated micro-batches, the last step of one alone."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(20, 16, generator=generator), torch.randn(20, 1, generator=generator))
    model, prepared, batches = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            prepared.step()
            prepared.zero_grad()


@pytest.mark.parametrize("release", [True, False])
def test_a_loop_of_accelerate_trains_to_the_bits_of_torchs_adamw(release):
    """Whether accelerate clips what is in place, or the optimizer clips what it was given."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 1))
    theirs = copy.deepcopy(ours)
    own = {"release_gradients": True, "max_grad_norm": CLIP, "micro_batches": ACCUMULATION} if release else {}
    optimizer = OffloadedAdamW(ours.parameters(), **SETTINGS, **own, workers=2)
    loop(ours, optimizer, 0 if release else CLIP)
    if release:
        loop(theirs, law_one.clipping_adamw(theirs.parameters(), CLIP, **SETTINGS), 0)
    else:
        loop(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True), CLIP)
    assert optimizer.ledger.steps == 3 and (optimizer.norm.value > CLIP) == release, "clipping must act"
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)
    optimizer.close()
