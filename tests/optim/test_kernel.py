"""The kernel's loops, as TorchScript and as plain Python, against torch's own optimizer and sums."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.optim import kernel, loops
from headrace.optim.kernel import BucketTensors, Hyper
from headrace.schedule.layout import BLOCK, Parameter, cut

HYPER = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
sizes = st.lists(st.one_of(st.integers(1, 50), st.integers(1, 4000)), min_size=1, max_size=6)


@pytest.fixture(params=["scripted", "plain", "public"])
def variant(request, monkeypatch):
    """What a torch with TorchScript runs, one without it, and one without the private function."""
    if request.param != "scripted":
        monkeypatch.setattr(kernel, "LOOPS", loops.PLAIN)
    if request.param == "public":
        monkeypatch.setattr(loops, "fused_adamw", loops._fused_public)
    return request.param


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript ends with Python 3.13")
def test_the_loops_are_scripted_and_keep_the_update():
    scripted = loops.LOOPS.update
    assert isinstance(scripted, torch.jit.ScriptFunction)
    assert "aten::_fused_adamw_" in str(scripted.inlined_graph)


@pytest.mark.parametrize("coefficient", [1.0, 0.37])
def test_any_bucket_equals_torch(variant, coefficient):
    @settings(deadline=None, max_examples=30)
    @given(sizes, dtypes, st.booleans(), st.integers(1, 3), st.sampled_from([16, 64, 1024]), st.data())
    def check(numels, dtype, summed, workers, chunk, data):
        absent = data.draw(st.integers(-1, len(numels) - 1), "absent")
        (bucket,) = cut([Parameter("p", n, 0, "bf16") for n in numels], BLOCK).buckets
        tensors = random_bucket(bucket.size, torch.float32 if summed else dtype, dtype)
        if tensors.gradient.dtype == dtype and data.draw(st.booleans(), "in place"):
            tensors = replace(tensors, weight=tensors.gradient)
        theirs = [adamw_alone(tensors, s, coefficient) for s in bucket.segments]
        before = tensors.master.clone()
        counts = {p: torch.tensor(float(p + 1)) for p in range(len(numels)) if p != absent}
        for worker in range(workers):
            span = kernel.share(bucket.size, worker, workers)
            scratch = torch.empty(chunk)
            kernel.adamw(bucket, tensors, span, counts, HYPER, coefficient, scratch)
        for s, (master, exp_avg, exp_avg_sq) in zip(bucket.segments, theirs, strict=True):
            place = slice(s.offset, s.end)
            if s.parameter == absent:
                assert torch.equal(tensors.master[place], before[place])
                continue
            assert torch.equal(tensors.master[place], master)
            assert torch.equal(tensors.exp_avg[place], exp_avg)
            assert torch.equal(tensors.exp_avg_sq[place], exp_avg_sq)
            assert torch.equal(tensors.weight[place], master.to(dtype))

    check()


def random_bucket(size, gradient_dtype, weight_dtype):
    generator = torch.Generator().manual_seed(size)
    master, exp_avg, exp_avg_sq, gradient = (torch.randn(size, generator=generator) for _ in range(4))
    weight = torch.zeros(size, dtype=weight_dtype)
    return BucketTensors(master, exp_avg, exp_avg_sq.square_(), gradient.to(gradient_dtype), weight)


def adamw_alone(tensors, segment, coefficient):
    """torch.optim.AdamW(fused=True) on a parameter of its own."""
    place = slice(segment.offset, segment.end)
    parameter = torch.nn.Parameter(tensors.master[place].clone())
    parameter.grad = tensors.gradient[place].float() * coefficient
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=HYPER.lr,
        betas=(HYPER.beta1, HYPER.beta2),
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        fused=True,
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(float(segment.parameter)),
        "exp_avg": tensors.exp_avg[place].clone(),
        "exp_avg_sq": tensors.exp_avg_sq[place].clone(),
    }
    optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_squares_are_taken_in_fp64(variant, dtype):
    (bucket,) = cut([Parameter("a", 70_000, 0, "bf16"), Parameter("b", 5, 0, "bf16")], 2 * BLOCK).buckets
    gradient = torch.randn(bucket.size).to(dtype)
    blocks = [block for s in bucket.segments for block in kernel.blocks_of(s)]
    found = kernel.block_sums(gradient, blocks, torch.empty(BLOCK, dtype=torch.float64))
    exact = [gradient[b.offset : b.end].double() for b in blocks]
    assert found == [float(torch.dot(values, values)) for values in exact]
