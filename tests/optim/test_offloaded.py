"""OffloadedAdamW against torch.optim.AdamW(fused=True): bit equality, whatever the layout."""

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW

BLOCK = 2**16


def make_parameters(sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def gradients(sizes, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(size, generator=generator) * 0.1 for size in sizes]


def set_gradients(parameters, values):
    """Through autograd, so that hooks fire."""
    total = sum((p.float() * g).sum() for p, g in zip(parameters, values, strict=True) if g is not None)
    total.backward()


def reference_clip(parameters, limit):
    """The factor of the layout-free norm: fp64 sums over blocks of 64 Ki elements, in parameter order."""
    threads, total = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)  # a block's sum is one thread's
    for p in parameters:
        if p.grad is not None:
            for block in p.grad.reshape(-1).split(BLOCK):
                values = block.double()
                total += float(torch.dot(values, values))
    torch.set_num_threads(threads)
    norm = math.sqrt(total)
    coefficient = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
    if coefficient != 1.0:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(coefficient)
    return norm


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.detach(), b.detach())


SIZES = [(64, 48), (7,), (300, 250), (), (0,), (17,), (3, 70001)]


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("bucket", [BLOCK, 3 * BLOCK, 2**24])
@pytest.mark.parametrize("workers", [1, 3])
def test_bit_equal_to_torch_with_clipping(release, bucket, workers):
    ours, theirs = make_parameters(SIZES), make_parameters(SIZES)
    optimizer = OffloadedAdamW(
        ours, lr=1e-2, max_grad_norm=1.0, release_gradients=release, bucket=bucket, workers=workers
    )
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(4):
        values = gradients(SIZES, step)
        set_gradients(ours, values)
        set_gradients(theirs, values)
        norm = reference_clip(theirs, 1.0)
        optimizer.step()
        reference.step()
        assert optimizer.norm.value == norm
        assert optimizer.norm.coefficient < 1
        assert_same(ours, theirs)
        optimizer.zero_grad()
        reference.zero_grad()
    optimizer.close()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * BLOCK + 37), min_size=1, max_size=5),
    capacity=st.integers(1, 4),
    workers=st.integers(1, 3),
    groups=st.integers(1, 2),
)
def test_bit_equal_for_any_layout(sizes, capacity, workers, groups):
    ours, theirs = make_parameters(sizes), make_parameters(sizes)

    def grouped(parameters):
        settings_of = [
            {"lr": 1e-2, "weight_decay": 0.3},
            {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
        found = [{"params": parameters[i::groups], **settings_of[i]} for i in range(groups)]
        return [group for group in found if group["params"]]

    optimizer = OffloadedAdamW(
        grouped(ours), release_gradients=True, bucket=capacity * BLOCK, workers=workers, max_grad_norm=0.5
    )
    reference = torch.optim.AdamW(grouped(theirs), fused=True)
    ordered = [p for group in reference.param_groups for p in group["params"]]
    for step in range(2):
        values = gradients(sizes, step)
        set_gradients(ours, values)
        set_gradients(theirs, values)
        reference_clip(ordered, 0.5)
        optimizer.step()
        reference.step()
        reference.zero_grad()
    assert_same(ours, theirs)
    optimizer.close()


@pytest.mark.parametrize("release", [True, False])
def test_accumulation_sums_in_fp32(release):
    ours, theirs = make_parameters(SIZES), make_parameters(SIZES)
    optimizer = OffloadedAdamW(
        ours, release_gradients=release, micro_batches=3, bucket=BLOCK, max_grad_norm=1.0
    )
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(3):
        for microbatch in range(3):
            values = gradients(SIZES, 10 * step + microbatch)
            set_gradients(ours, values)
            set_gradients(theirs, values)
        reference_clip(theirs, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    assert_same(ours, theirs)
    downs = sum(p.numel() for p in ours) * 4 * 3 * (3 if release else 1)
    assert optimizer.ledger.lane_bytes("d2h") == downs
    assert optimizer.ledger.lane_bytes("h2d") == sum(p.numel() for p in ours) * 4 * 3
    optimizer.close()


def test_gradients_missing_in_some_micro_batches():
    ours, theirs = make_parameters(SIZES), make_parameters(SIZES)
    optimizer = OffloadedAdamW(ours, release_gradients=True, micro_batches=2, bucket=BLOCK)
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        for microbatch in range(2):
            values = gradients(SIZES, 10 * step + microbatch)
            values = [v if (i + step + microbatch) % 3 else None for i, v in enumerate(values)]
            set_gradients(ours, values)
            set_gradients(theirs, values)
        optimizer.step()
        reference.step()
        reference.zero_grad()
        assert_same(ours, theirs)
    optimizer.close()


def test_unused_parameter_is_skipped_like_torch():
    ours, theirs = make_parameters([(5,), (6,)]), make_parameters([(5,), (6,)])
    optimizer = OffloadedAdamW(ours, lr=0.1, weight_decay=0.5, release_gradients=True)
    reference = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.5, fused=True)
    for parameters, stepper in ((ours, optimizer), (theirs, reference)):
        parameters[0].square().sum().backward()
        stepper.step()
    assert_same(ours, theirs)
    assert optimizer.counts == {"0": 1, "1": 0}
    assert list(optimizer.state_dict()["state"]) == [0]
    optimizer.close()


def test_bf16_keeps_progress_in_the_master_weights():
    ours = make_parameters([(4096,)], dtype=torch.bfloat16)
    master = [nn.Parameter(ours[0].detach().float().clone())]
    optimizer = OffloadedAdamW(ours, lr=5e-6, release_gradients=True, weight_decay=0.0)
    reference = torch.optim.AdamW(master, lr=5e-6, weight_decay=0.0, fused=True)
    start = ours[0].detach().clone()
    for step in range(40):
        value = gradients([(4096,)], step)[0].bfloat16()
        ours[0].backward(value)
        master[0].grad = value.float()
        optimizer.step()
        reference.step()
    assert torch.equal(torch.cat(optimizer.pieces("master", "0")), master[0].detach())
    assert torch.equal(ours[0].detach(), master[0].detach().bfloat16())
    moved = (master[0].detach() != start.float()).float().mean()
    assert moved > 0.99  # every step counts, though one alone is below bf16's resolution
    optimizer.close()


def test_norm_close_to_torch():
    parameters = make_parameters(SIZES)
    optimizer = OffloadedAdamW(parameters, max_grad_norm=1e9)
    values = gradients(SIZES, 0)
    set_gradients(parameters, values)
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1e9).item()
    optimizer.step()
    assert optimizer.norm.value == pytest.approx(expected, rel=1e-6)
    optimizer.close()


def test_foreign_clipping_and_scaling_work_on_grad():
    ours, theirs = make_parameters(SIZES), make_parameters(SIZES)
    optimizer = OffloadedAdamW(ours, bucket=BLOCK)
    reference = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    for parameters, stepper in ((ours, optimizer), (theirs, reference)):
        set_gradients(parameters, gradients(SIZES, 3))
        torch.nn.utils.clip_grad_norm_(parameters, 0.25)
        stepper.step()
        assert all(p.grad is not None for p in parameters)
    assert_same(ours, theirs)
    optimizer.close()


def test_state_dict_round_trip_and_torch_state():
    def trained(steps, optimizer, parameters, start=0):
        for step in range(start, start + steps):
            set_gradients(parameters, gradients(SIZES, step))
            optimizer.step()
            optimizer.zero_grad()

    theirs = make_parameters(SIZES)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    trained(3, reference, theirs)
    mid = [p.detach().clone() for p in theirs]
    torch_state = copy.deepcopy(reference.state_dict())
    trained(3, reference, theirs, start=3)

    first = make_parameters(SIZES)
    one = OffloadedAdamW(first, lr=1e-2, bucket=BLOCK, release_gradients=True)
    assert one.state_dict()["state"] == {}
    trained(3, one, first)
    assert_same(first, mid)
    state = copy.deepcopy(one.state_dict())
    for loaded in (state, torch_state):
        second = [nn.Parameter(p.clone()) for p in mid]
        two = OffloadedAdamW(second, lr=9.0, bucket=4 * BLOCK)
        two.load_state_dict(loaded)
        assert two.param_groups[0]["lr"] == 1e-2
        trained(3, two, second, start=3)
        assert_same(second, theirs)
        two.close()
    one.close()


def test_master_weights_come_from_weights_loaded_after_construction():
    module = nn.Linear(8, 8)
    optimizer = OffloadedAdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    module.load_state_dict({"weight": torch.eye(8), "bias": torch.ones(8)})
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight.detach(), torch.eye(8))
    optimizer.close()


def test_tied_frozen_and_named_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(11, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.frozen(self.embedding(tokens)))

    tokens, one, two = torch.arange(11), Tied(), Tied()
    optimizer = OffloadedAdamW(one.named_parameters(), release_gradients=True)
    reference = torch.optim.AdamW(two.parameters(), fused=True)
    assert optimizer.names == ["embedding.weight"]
    for _ in range(3):
        for module, stepper in ((one, optimizer), (two, reference)):
            module(tokens).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    assert torch.equal(one.embedding.weight, two.embedding.weight)
    assert one.head.weight is one.embedding.weight
    one.frozen.requires_grad_(True)
    with pytest.raises(UserError, match="frozen when OffloadedAdamW was built"):
        optimizer.step()
    optimizer.close()


def test_closure_and_scheduler():
    ours, theirs = make_parameters([(40,)]), make_parameters([(40,)])
    optimizer, reference = OffloadedAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference)]

    def closure_of(parameters, stepper):
        def closure():
            stepper.zero_grad()
            loss = parameters[0].square().sum()
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        a = optimizer.step(closure_of(ours, optimizer))
        b = reference.step(closure_of(theirs, reference))
        assert torch.equal(a, b)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(ours, theirs)
    optimizer.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    parameters = make_parameters([(BLOCK + 3,), (50,)])
    optimizer = OffloadedAdamW(
        [("early", parameters[0]), ("late", parameters[1])], release_gradients=True, max_grad_norm=1.0
    )
    before = [p.detach().clone() for p in parameters]
    values = gradients([(BLOCK + 3,), (50,)], 0)
    values[1][7] = bad
    set_gradients(parameters, values)
    with pytest.warns(UserWarning, match="not finite in late"):
        optimizer.step()
    assert_same(parameters, before)
    assert optimizer.skipped == 1 and optimizer.counts == {"early": 0, "late": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_gradients(parameters, gradients([(BLOCK + 3,), (50,)], 1))
        optimizer.step()
    assert optimizer.counts == {"early": 1, "late": 1}
    optimizer.close()


def test_zero_grad_discards_what_has_left():
    ours, theirs = make_parameters(SIZES), make_parameters(SIZES)
    optimizer, reference = OffloadedAdamW(ours, release_gradients=True), torch.optim.AdamW(theirs, fused=True)
    for seed, parameters, stepper in ((1, ours, optimizer), (2, theirs, reference)):
        set_gradients(parameters, gradients(SIZES, 1))
        stepper.zero_grad()
        set_gradients(parameters, gradients(SIZES, 5))
        stepper.step()
        del seed
    assert_same(ours, theirs)
    optimizer.close()


def test_budget_is_refused_before_allocating():
    parameters = make_parameters([(1000, 1000)])
    with pytest.raises(UserError, match=r"memory\.host"):
        OffloadedAdamW(parameters, host="10MiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"bucket": 1000}, "multiple of 65,536"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"host": "lots"}, "not a size"),
        ({"disk": "/nvme"}, "disk='/nvme' must be directories with their budgets"),
        ({"disk": {"/tmp": "lots"}}, "not a size"),
        ({"window": 0}, "window=0 must be a whole number of at least 1"),
        ({"kept": -1}, "kept=-1 must be"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        OffloadedAdamW(make_parameters([(4,)]), **arguments)


def test_more_backwards_than_declared_is_an_error():
    parameters = make_parameters([(4,)])
    optimizer = OffloadedAdamW(parameters, release_gradients=True)
    parameters[0].sum().backward()
    with pytest.raises(UserError, match="micro_batches=2"):
        parameters[0].sum().backward()
    optimizer.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_host_bytes_are_exact(micro_batches):
    sizes = [(100, 7), (33,)]
    optimizer = OffloadedAdamW(
        make_parameters(sizes, dtype=torch.bfloat16),
        release_gradients=True,
        micro_batches=micro_batches,
        workers=2,
    )
    padded = 704 + 48
    staging = 2 * padded * 2 if micro_batches == 2 else 0
    peaks = optimizer.ledger.peaks["ram"]
    assert peaks["states"] == 12 * padded
    assert peaks["gradients"] == 2 * micro_batches * padded
    assert peaks["buffers"] == staging + 2 * (2**15 * 4 + 2**16 * 8)
    optimizer.close()
    assert optimizer.host.held == 0
