"""Saved states: what is none is refused as a whole, what is one replaces everything that was there."""

import copy
import io

import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW

SIZES = [(5, 7), (2**16 + 3,), (), (0,)]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def train(weights, optimizer, seeds, skip=()):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for index, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator)
            weight.grad = None if index in skip else gradient
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained():
    """An optimizer after two steps, and its weights."""
    weights = parameters()
    optimizer = OffloadedAdamW(weights, lr=1e-2, bucket=2**16, workers=2)
    train(weights, optimizer, [1, 2])
    yield weights, optimizer
    optimizer.close()


@pytest.fixture
def torch_state():
    weights = parameters()
    reference = torch.optim.AdamW(weights, lr=1e-2)
    train(weights, reference, [1, 2])
    return copy.deepcopy(reference.state_dict())


def snapshot(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    return buffer.getvalue()


def edited(state, *keys, value=None, delete=False):
    place = state
    for key in keys[:-1]:
        place = place[key]
    if delete:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return state


SGD = torch.optim.SGD(parameters(), lr=0.5, momentum=0.9).state_dict()

BAD = {
    "another dict": (lambda s: {"foo": 1}, "must have 'state' and 'param_groups', not 'foo'"),
    "nothing": (lambda s: {}, "must have 'state' and 'param_groups', not nothing"),
    "None": (lambda s: None, "not 'NoneType'"),
    "a list": (lambda s: [s], "not 'list'"),
    "no groups": (lambda s: edited(s, "param_groups", delete=True), "not 'state'"),
    "groups of another kind": (lambda s: edited(s, "param_groups", value=3), "param_groups are damaged"),
    "a group without params": (
        lambda s: edited(s, "param_groups", 0, "params", delete=True),
        "param_groups are damaged",
    ),
    "state of another kind": (lambda s: edited(s, "state", value=[1]), "param_groups are damaged"),
    "two groups": (
        lambda s: edited(s, "param_groups", value=s["param_groups"] * 2),
        r"param groups of \[4, 4\] parameters, this optimizer of \[4\]",
    ),
    "SGD": (lambda s: copy.deepcopy(SGD), "has no betas and no eps: load the state of an AdamW"),
    "a rate that is none": (
        lambda s: edited(s, "param_groups", 0, "lr", value="x"),
        "lr='x' must be a number",
    ),
    "amsgrad": (
        lambda s: edited(s, "param_groups", 0, "amsgrad", value=True),
        "amsgrad=True is not supported",
    ),
    "a stranger": (lambda s: edited(s, "state", "w", value={}), "holds 'w', which none of its param groups"),
    "no step": (lambda s: edited(s, "state", 1, "step", delete=True), "of 1 has no step"),
    "no moments": (
        lambda s: edited(s, "state", 1, value={"step": 1.0, "momentum_buffer": torch.ones(3)}),
        "of 1 has no exp_avg and no exp_avg_sq",
    ),
    "half a step": (lambda s: edited(s, "state", 1, "step", value=1.5), "step of 1 is 1.5, not a number of"),
    "no tensor": (lambda s: edited(s, "state", 1, "exp_avg", value=3.0), "exp_avg of 1 has shape 3.0"),
    "another shape": (
        lambda s: edited(s, "state", 1, "exp_avg_sq", value=torch.ones(3)),
        r"exp_avg_sq of 1 has shape \(3,\), the parameter \(65539,\)",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_what_is_no_state_is_refused_and_nothing_is_loaded(trained, torch_state, case):
    weights, optimizer = trained
    break_, sentence = BAD[case]
    bad = break_(torch_state)
    before, kept = snapshot(optimizer), [weight.detach().clone() for weight in weights]
    with pytest.raises(UserError, match=sentence) as caught:
        optimizer.load_state_dict(bad)
    assert "\n" not in str(caught.value)
    assert snapshot(optimizer) == before
    assert all(torch.equal(a, b) for a, b in zip(weights, kept, strict=True))


@pytest.mark.parametrize("skip", [(), (0,), (0, 1, 2, 3)])
def test_a_loaded_state_replaces_all_moments_like_torchs(trained, skip):
    """Also those of parameters that the saved state does not know, and with a state that is empty."""
    weights, optimizer = trained
    saved = parameters()
    source = torch.optim.AdamW(saved, lr=3e-3, fused=True)
    if len(skip) < len(saved):
        train(saved, source, [7], skip)
    state = copy.deepcopy(source.state_dict())
    theirs = [nn.Parameter(weight.detach().clone()) for weight in weights]
    reference = torch.optim.AdamW(theirs, fused=True)
    train(theirs, reference, [])
    reference.load_state_dict(copy.deepcopy(state))
    optimizer.load_state_dict(state)
    for seed in (11, 12):
        train(weights, optimizer, [seed])
        train(theirs, reference, [seed])
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
    assert optimizer.param_groups[0]["lr"] == 3e-3


def test_ids_of_any_kind_are_matched_by_their_place_in_the_groups(trained):
    """As torch does: other tools save names in their place."""
    _, optimizer = trained
    expected = snapshot(optimizer)
    names = {0: "a", 1: "b", 2: "c", 3: "d"}
    master = optimizer.state_dict()["state"]
    renamed = {names[position]: {**entry} for position, entry in copy.deepcopy(master).items()}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": list("abcd")}]
    optimizer.load_state_dict({"state": dict(reversed(renamed.items())), "param_groups": groups})
    assert snapshot(optimizer) == expected


def test_a_loaded_group_shares_nothing_with_the_saved_one(trained, torch_state):
    _, optimizer = trained
    torch_state["param_groups"][0]["lr"] = torch.tensor(0.25)
    optimizer.load_state_dict(torch_state)
    torch_state["param_groups"][0]["lr"].fill_(9.0)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_loading_nothing_into_a_new_optimizer_touches_nothing():
    """As ``accelerate.prepare`` does: the weights may still be loaded afterwards."""
    weights = parameters()
    optimizer = OffloadedAdamW(weights)
    versions = [weight._version for weight in weights]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [weight._version for weight in weights] == versions
    assert len(optimizer.state_dict()["state"]) == 0
    optimizer.close()
