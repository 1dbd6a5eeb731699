"""Weights that were moved or replaced are refused; those that somebody wrote to are followed, as by torch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW, SkippedStep

BOTH = pytest.mark.parametrize("release", [True, False])
BLOCK = 2**16


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to(dtype)


def backward(model, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def replace_clone(model):
    model[2].weight.data = model[2].weight.data.clone()


def replace_other_shape(model):
    model[2].weight.data = model[2].weight.data[:, :4]


def replace_same_address(model):
    model[2].bias.data = model[2].bias.data.view(1, 1)


def convert(model):
    model.bfloat16()


def swap(model):
    torch.utils.swap_tensors(model[2].weight, nn.Parameter(torch.zeros(1, 16)))


def one_vector(model):
    """The parameters become views of one vector."""
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())


MOVES = [replace_clone, replace_other_shape, replace_same_address, convert, swap, one_vector]


@BOTH
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_a_moved_or_replaced_parameter_is_refused(release, steps, move):
    model = make_model()
    optimizer = OffloadedAdamW(model.named_parameters(), release_gradients=release, workers=2)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    counts = optimizer.counts
    move(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UserError, match=r"\S+ was moved or replaced since OffloadedAdamW was built .* then"):
        optimizer.step()
    with pytest.raises(UserError, match="moved or replaced"):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
        optimizer.restore(counts)
    assert optimizer.counts == counts
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.close()


def test_the_name_is_that_of_the_parameter_that_moved():
    model = make_model()
    optimizer = OffloadedAdamW(model.named_parameters())
    replace_clone(model)
    with pytest.raises(UserError, match=r"^2\.weight was moved or replaced .*float32 \[1, 16\] on cpu at 0x"):
        optimizer.step()
    optimizer.close()


@BOTH
def test_a_model_that_has_other_parameters_now_is_noticed(release):
    """``to("meta")`` puts new parameters into the model; nothing reaches the old ones any more."""
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release)
    model.to("meta")
    with pytest.warns(SkippedStep, match="found no gradient of any parameter"):
        optimizer.step()
    assert optimizer.skipped == 0 and set(optimizer.counts.values()) == {0}
    optimizer.close()


def load(model):
    model.load_state_dict({name: torch.full_like(t, 0.25) for name, t in model.state_dict().items()})


def clamp(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def scale_in_inference_mode(model):
    with torch.inference_mode():
        model[0].weight.mul_(0.5)


def init(model):
    nn.init.constant_(model[2].bias, 3.0)


def one_element(model):
    with torch.no_grad():
        model[0].weight[3, 3] = -0.0


def through_detach(model):
    model[2].weight.detach().zero_()


def share(model):
    """Moves the memory under its tensors, ours too: no write, and no move that anybody can see."""
    model.share_memory()


WRITES = [load, clamp, scale_in_inference_mode, init, one_element, through_detach, share]


@BOTH
@pytest.mark.parametrize("between", ["before backward", "after backward"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_to_the_weights_are_followed_with_torchs_bits(release, between, write):
    ours, theirs = make_model(), make_model()
    optimizer = OffloadedAdamW(ours.parameters(), lr=1e-2, release_gradients=release, workers=2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        for model, stepper in ((ours, optimizer), (theirs, reference)):
            if step and between == "before backward":
                write(model)
            backward(model, step)
            if step and between == "after backward":
                write(model)
            stepper.step()
            stepper.zero_grad()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), step
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_elements_that_nobody_changed_keep_their_master_weight(dtype):
    """Swapping averaged weights in and back out, or loading a model's own checkpoint, loses no progress."""
    models = make_model(dtype), make_model(dtype)
    optimizers = [OffloadedAdamW(m.named_parameters(), lr=1e-4, workers=2) for m in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        kept = copy.deepcopy(models[0].state_dict())
        load(models[0])
        models[0].load_state_dict(kept)
    for name in optimizers[0].names:
        one, other = (torch.cat(optimizer.pieces("master", name)) for optimizer in optimizers)
        assert torch.equal(one, other)
        assert not torch.equal(one, one.to(dtype).float())
    for optimizer in optimizers:
        optimizer.close()


@settings(max_examples=25, deadline=None)
@given(
    numel=st.integers(1, 3 * BLOCK + 37),
    changed=st.lists(st.integers(0, 2**20), max_size=5),
    value=st.sampled_from([0.0, -0.0, 7.0, float("nan")]),
)
def test_exactly_the_changed_elements_are_taken(numel, changed, value):
    parameter = nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(1)).bfloat16())
    optimizer = OffloadedAdamW([parameter], lr=1e-3, bucket=BLOCK, workers=2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = torch.cat(optimizer.pieces("master", "0"))
    places = [index % numel for index in changed]
    with torch.no_grad():
        for index in places:
            parameter[index] = value
            expected[index] = value
    found = torch.cat(optimizer.pieces("master", "0"))
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    optimizer.close()


def test_two_optimizers_on_one_model_follow_each_other_like_torchs():
    ours, theirs = make_model(), make_model()
    pairs = []
    for model, build in ((ours, OffloadedAdamW), (theirs, torch.optim.AdamW)):
        extra = {"fused": True} if build is torch.optim.AdamW else {"workers": 1}
        pairs.append((model, [build(model.parameters(), lr=lr, **extra) for lr in (1e-2, 3e-3)]))
    for step in range(3):
        for model, optimizers in pairs:
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    for optimizer in pairs[0][1]:
        optimizer.close()


def test_a_state_read_after_a_write_holds_it():
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    load(model)
    for entry in optimizer.state_dict()["state"].values():
        assert torch.equal(entry["master"], torch.full_like(entry["master"], 0.25))
    optimizer.close()
