"""Threads, hooks and memory of an optimizer end with it, whichever way it ends, and the model lives on."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW
from headrace.optim.policies.sync import Sync
from headrace.schedule.action import parse

BOTH = pytest.mark.parametrize("release", [True, False])
TIMEOUT = 60


def first_master(optimizer):
    store = optimizer._engine.store
    return store.states.tables(store.layout.buckets[0], None)["master"]


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("headrace-")}


@pytest.fixture
def no_new_threads():
    before = threads()
    yield
    assert threads() <= before


@pytest.fixture
def make_model():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    return make


def backward(model, seed=0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def assert_plain(model, twin):
    """Backward of the model gives what it gives without any optimizer, twice, since sums matter too."""
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        each.zero_grad()
        backward(each, seed=1)
        backward(each, seed=2)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@BOTH
@pytest.mark.parametrize("pending", [True, False])
def test_del_frees_everything_at_once(make_model, no_new_threads, release, pending):
    """By reference counts alone, as long as nobody else put the optimizer into a cycle."""
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release, workers=3, bucket=2**16)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if pending:
        backward(model)
    budget, state = optimizer.host, weakref.ref(first_master(optimizer))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None and state() is None
    finally:
        gc.enable()
    assert pending or budget.held == 0
    assert_plain(model, make_model())


@BOTH
def test_a_model_goes_with_its_optimizer(make_model, no_new_threads, release):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release, workers=2)
    backward(model)
    optimizer.step()
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_a_scheduler_does_not_keep_it(make_model, no_new_threads):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=True, workers=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model)
    optimizer.step()
    scheduler.step()
    gone = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert gone() is None


def test_the_garbage_collector_may_run_on_a_thread_of_the_optimizer(make_model):
    """Which then cannot wait for its own end."""
    before = threads()
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=True, workers=2)
    optimizer.itself = optimizer  # a cycle
    gone, go = weakref.ref(optimizer), threading.Event()

    def collect():
        assert go.wait(TIMEOUT)
        gc.collect()
        return 0

    event = optimizer.lanes.submit(parse("0DOWN0.b0"), collect)
    gc.disable()
    try:
        del optimizer
        go.set()
        event.wait()
    finally:
        gc.enable()
    assert gone() is None
    for thread in threads() - before:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), thread.name
    assert_plain(model, make_model())


@BOTH
def test_close_gives_the_memory_back_and_the_model_is_plain_again(make_model, no_new_threads, release):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release, workers=3)
    backward(model)
    optimizer.step()
    master = weakref.ref(first_master(optimizer))
    optimizer.close()
    assert master() is None and optimizer.host.held == 0
    assert_plain(model, make_model())
    optimizer.close()  # once more does nothing


@BOTH
def test_after_close_each_use_is_refused(make_model, release):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release, workers=2)
    backward(model)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    uses = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(state),
        "pieces": lambda: optimizer.pieces("master", optimizer.names[0]),
        "restore": lambda: optimizer.restore(dict.fromkeys(optimizer.names, 0)),
    }
    for name, use in uses.items():
        with pytest.raises(UserError, match=rf"^{name}\(\) came after close\(\)"):
            use()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_gradients_under_way_are_dropped_by_close(make_model, no_new_threads):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=True, micro_batches=2, workers=2)
    model[0](torch.ones(1, 8)).sum().backward()  # half of the bucket
    optimizer.close()
    assert_plain(model, make_model())


class Broken(Sync):
    """A policy that fails where the threads run already."""

    executors = 5


class Refusing(nn.Parameter):
    """A parameter that takes no hook."""

    def register_post_accumulate_grad_hook(self, hook):
        raise RuntimeError("no hooks here")


def test_a_failed_constructor_leaves_nothing(make_model, no_new_threads):
    model = make_model()
    odd = Refusing(torch.ones(3))
    for error, arguments in (
        (UserError, {"host": "1KiB"}),
        (TypeError, {"policy": Broken()}),
        (RuntimeError, {}),
    ):
        extra = [] if arguments else [odd]
        with pytest.raises(error):
            OffloadedAdamW([*model.parameters(), *extra], release_gradients=True, workers=3, **arguments)
        assert_plain(model, make_model())


@BOTH
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_copies_are_refused(make_model, release, copied):
    model = make_model()
    optimizer = OffloadedAdamW(model.parameters(), release_gradients=release, workers=2)
    with pytest.raises(UserError, match=r"cannot be copied or pickled: copy or save its state_dict\(\)"):
        copied(optimizer)
    backward(model)
    optimizer.step()
    assert set(optimizer.counts.values()) == {1}
    optimizer.close()


FORK = """
import os, sys, warnings
import torch
from torch import nn
from headrace import OffloadedAdamW
from headrace.errors import UserError
warnings.simplefilter("ignore")
torch.set_num_threads(1)
release = {release}
weight = nn.Parameter(torch.ones(5))
optimizer = OffloadedAdamW([weight], release_gradients=release, workers=2, lr=0.5)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()
expected = optimizer.state_dict()["state"][0]["master"].clone()

def attempt(what, use):
    try:
        use()
    except UserError as error:
        print(what, "refused:", error, flush=True)
    else:
        print(what, "done", flush=True)

if not (child := os.fork()):
    attempt("backward", lambda: weight.sum().backward())
    attempt("step", optimizer.step)
    attempt("zero_grad", optimizer.zero_grad)
    attempt("restore", lambda: optimizer.restore(optimizer.counts))
    same = torch.equal(optimizer.state_dict()["state"][0]["master"], expected)
    print("state", "readable" if same else "wrong", flush=True)
    attempt("close", optimizer.close)
    sys.exit(0)  # with Python's whole shutdown
status = os.waitpid(child, 0)[1]
weight.sum().backward()
optimizer.step()
print("parent", status, optimizer.counts["0"], flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@BOTH
def test_in_a_fork_work_is_refused_and_reading_is_not(release):
    code = textwrap.dedent(FORK).format(release=release)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    refused = ["step", "restore", *(["backward"] if release else [])]
    for what in refused:
        assert lines[what].startswith(f"refused: {what}() was called in process"), lines
        assert "build the optimizer in the process that trains" in lines[what]
    assert {lines[what] for what in ("zero_grad", "close")} == {"done"}
    assert lines["state"] == "readable" and lines["parent"] == "0 2"
