"""Weights on a CUDA device, states on the host: the bits of torch's fused AdamW on the CPU."""

import pytest
import torch
from torch import nn

from headrace.optim.offloaded import OffloadedAdamW

SIZES = [(64, 48), (7,), (300, 250), (), (0,), (3, 70001)]
BLOCK = 2**16


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to("cuda", dtype)) for size in SIZES]


def gradients(seed, dtype):
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def arrive(weights, values):
    """Through autograd, so that hooks fire."""
    torch.autograd.backward(list(weights), [value.to("cuda") for value in values])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("gradients_wait", ["host", "disk"])
def test_bit_equal_to_torch_on_the_host(tmp_path, dtype, micro_batches, release, gradients_wait):
    weights = parameters(dtype)
    masters = [nn.Parameter(weight.detach().cpu().float()) for weight in weights]
    reference = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    options = {"disk": {str(tmp_path): None}, "gradients": "disk"} if gradients_wait == "disk" else {}
    options |= {"release_gradients": release, "micro_batches": micro_batches}
    ours = OffloadedAdamW(weights, lr=1e-2, bucket=BLOCK, **options)
    summed = torch.float32 if release else dtype  # .grad itself accumulates in the weights' dtype
    for step in range(4):
        sums = None
        for micro_batch in range(micro_batches):
            values = gradients(10 * step + micro_batch, dtype)
            arrive(weights, values)
            added = [value.to(summed) for value in values]
            sums = added if sums is None else [a + b for a, b in zip(sums, added, strict=True)]
        for master, total in zip(masters, sums, strict=True):
            master.grad = total.float()
        ours.step()
        ours.zero_grad()
        reference.step()
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(weight.detach().cpu(), master.detach().to(dtype))
    ours.close()


def test_gradients_leave_the_device_during_backward():
    weights = [nn.Parameter(torch.zeros(2**20, device="cuda")) for _ in range(16)]
    ours = OffloadedAdamW(weights, bucket=2**20, release_gradients=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sum((weight * 2).sum() for weight in weights).backward()
    assert all(weight.grad is None for weight in weights)
    ours.step()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert ours.ledger.peaks["device"]["gradients"] < 16 * 2**22
    ours.close()


def test_states_stay_on_the_host_through_a_round_trip():
    weights = parameters(torch.bfloat16)
    ours = OffloadedAdamW(weights, release_gradients=True)
    arrive(weights, gradients(0, torch.bfloat16))
    ours.step()
    state = ours.state_dict()
    moved = {i: {k: v.cuda() for k, v in held.items()} for i, held in state["state"].items()}
    other = OffloadedAdamW(parameters(torch.bfloat16), release_gradients=True)
    other.load_state_dict({"state": moved, "param_groups": state["param_groups"]})
    for index, held in other.state_dict()["state"].items():
        for name, value in held.items():
            assert value.device.type == "cpu"
            assert torch.equal(value, state["state"][index][name])
    ours.close()
    other.close()
