"""Every argument that no optimizer can have is refused in one sentence, and leaves nothing behind."""

import math
import threading

import numpy
import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.ledger import Ledger
from headrace.optim.offloaded import OffloadedAdamW, SkippedStep
from headrace.optim.policies.sync import Sync

NO_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 1e300, 10**400, "1e-3", None, True, [1.0], 1j]
NO_BETAS = [
    0.9,
    (0.9,),
    (0.9, 0.99, 0.999),
    (0.9, 1.0),
    (-0.1, 0.9),
    (0.9, math.nan),
    ("0.9", 0.99),
    "ab",
    None,
]
NO_COUNTS = [0, -1, 1.5, 2.0, math.nan, "2", True, [1]]


def parameters():
    return [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]


def refused(start, *arguments, **options):
    """The sentence begins with the argument and its value."""
    before = threading.active_count()
    with pytest.raises(UserError) as caught:
        OffloadedAdamW(*arguments, release_gradients=options.pop("release_gradients", True), **options)
    sentence = str(caught.value)
    assert sentence.startswith(start), sentence
    assert "\n" not in sentence and threading.active_count() == before
    return sentence


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_numbers_that_cannot_train(name, value):
    refused(f"{name}={value!r} must be a number from 0", parameters(), **{name: value})
    one, other = parameters()
    groups = [{"params": [one]}, {"params": [other], name: value}]
    refused(f"{name}={value!r} of param group 1 must be a number", groups)


@pytest.mark.parametrize("value", NO_BETAS, ids=repr)
def test_betas_that_cannot_train(value):
    refused(f"betas={value!r} must be two numbers in [0, 1)", parameters(), betas=value)
    refused(f"betas={value!r} must be two numbers", [{"params": parameters(), "betas": value}])


@pytest.mark.parametrize("value", [math.nan, -1.0, "1", None, True])
def test_no_clipping_by_such_a_norm(value):
    refused(f"max_grad_norm={value!r} must be", parameters(), max_grad_norm=value)


@pytest.mark.parametrize("name", ["workers", "micro_batches", "bucket"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_counts_that_are_none(name, value):
    refused(f"{name}={value!r} must be a", parameters(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 100_000),
        ("bucket", 1000),
        ("bucket", 65536.0),
        ("micro_batches", None),
        ("policy", "sync"),
        ("policy", Sync),
        ("ledger", {}),
        ("release_gradients", "no"),
        ("release_gradients", None),
    ],
)
def test_options_of_the_wrong_kind(name, value):
    refused(f"{name}={value!r} must be", parameters(), **{name: value})


@pytest.mark.parametrize("host", ["lots", True, -1, 0, math.nan, [1]])
def test_budgets_that_are_no_size(host):
    with pytest.raises(ValueError, match="size"):
        OffloadedAdamW(parameters(), host=host)


@pytest.mark.parametrize("name", ["amsgrad", "maximize"])
def test_other_methods_in_a_param_group(name):
    refused(f"{name}=True is not supported", [{"params": parameters(), name: True}])


def lazy():
    return nn.LazyLinear(3).weight


def meta():
    return nn.Parameter(torch.ones(3, device="meta"))


def inference():
    with torch.inference_mode():
        return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lazy, "odd has no shape yet"),
        (meta, "odd holds no values of its own (Tensor on meta)"),
        (inference, "odd was made under torch.inference_mode()"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)), "odd is torch.float64"),
        (lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "odd is torch.complex64"),
        (lambda: nn.Parameter(torch.ones(3, 2).t()), "odd is not contiguous"),
        (lambda: nn.Parameter(torch.ones(1).expand(4)), "odd is not contiguous"),
    ],
    ids=["lazy", "meta", "inference", "fp64", "complex", "transposed", "expanded"],
)
def test_parameters_that_cannot_be_trained(make, sentence):
    refused(sentence, [("plain", nn.Parameter(torch.ones(2))), ("odd", make())])


def test_a_frozen_parameter_may_be_anything():
    meta = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    optimizer = OffloadedAdamW([("plain", nn.Parameter(torch.ones(2))), ("frozen", meta)])
    assert optimizer.names == ["plain"]
    optimizer.close()


def test_parameters_that_share_memory():
    vector = torch.zeros(10)
    for one, two in ((vector[:6], vector[5:]), (vector, vector[2:4]), (vector, vector)):
        named = [("one", nn.Parameter(one)), ("two", nn.Parameter(two))]
        sentence = refused("", named)
        assert sentence == "one and two share memory: tie them to one parameter and pass it once"
    beside = OffloadedAdamW([nn.Parameter(vector[:5]), nn.Parameter(vector[5:])])
    beside.close()


def test_one_name_for_two_parameters():
    refused("2 parameters are called 'w'", [("w", parameter) for parameter in parameters()])


def test_numbers_of_many_kinds_are_taken():
    """From numpy and torch too: the update is that of plain numbers."""
    options = [
        {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "weight_decay": 0},
        {
            "lr": torch.tensor(0.5),
            "betas": [numpy.float32(0.5), 0.75],
            "eps": numpy.float64(0.25),
            "weight_decay": torch.tensor(0.0),
            "max_grad_norm": numpy.float64(math.inf),
            "micro_batches": numpy.int64(1),
            "bucket": numpy.int64(2**16),
            "workers": numpy.int32(2),
            "ledger": Ledger(),
            "policy": Sync(),
            "host": "1GiB",
        },
    ]
    found = []
    for each in options:
        weights = parameters()
        optimizer = OffloadedAdamW(weights, **each)
        for _ in range(2):
            sum(weight.square().sum() for weight in weights).backward()
            optimizer.step()
        found.append(torch.cat([*weights]).detach())
        optimizer.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, "0.1"])
def test_a_number_that_was_set_later_is_refused_before_it_acts(value):
    weights = parameters()
    optimizer = OffloadedAdamW(weights, release_gradients=True)
    sum(weight.sum() for weight in weights).backward()
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(UserError, match=rf"^lr={value!r} must be a number"):
        optimizer.step()
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert optimizer.counts == {"0": 1, "1": 1}
    optimizer.close()


def test_two_optimizers_cannot_both_release_the_gradients_of_one_model():
    weights = parameters()
    one, two = (OffloadedAdamW(weights, release_gradients=True) for _ in range(2))
    with pytest.raises(UserError, match=r"the gradient of [01] was gone .* took it"):
        sum(weight.sum() for weight in weights).backward()
    one.close()
    two.zero_grad()
    sum(weight.sum() for weight in weights).backward()
    two.step()
    assert two.counts == {"0": 1, "1": 1}
    two.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_set_by_hand_count_as_with_torch(micro_batches):
    """Beside released ones, with accumulation or without."""
    ours, theirs = parameters(), parameters()
    optimizer = OffloadedAdamW(ours, lr=0.1, release_gradients=True, micro_batches=micro_batches)
    reference = torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for step in range(3):
        for weights, stepper in ((ours, optimizer), (theirs, reference)):
            weights[1].grad = torch.full((3,), 0.25 + step)
            for _ in range(micro_batches if step != 1 else 0):
                weights[0].square().sum().backward()
            stepper.step()
            stepper.zero_grad()
        assert all(weight.grad is None for weight in ours)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert optimizer.counts == {"0": 2, "1": 3}
    optimizer.close()


def test_a_gradient_set_by_hand_on_top_of_a_released_one_is_refused():
    """torch would forget the released one, but it has left."""
    weights = parameters()
    optimizer = OffloadedAdamW([("a", weights[0]), ("b", weights[1])], release_gradients=True)
    sum(weight.sum() for weight in weights).backward()
    weights[1].grad = torch.ones(3)
    with pytest.raises(UserError, match=r"^b\.grad was set after backward\(\) had released the gradient"):
        optimizer.step()
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)
    optimizer.zero_grad()
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    assert optimizer.counts == {"a": 1, "b": 1}
    optimizer.close()


@pytest.mark.parametrize("release", [True, False])
def test_a_gradient_of_another_dtype_is_refused(release):
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    optimizer = OffloadedAdamW([("w", weight)], release_gradients=release)
    weight.grad = torch.ones(4)
    with pytest.raises(UserError, match=r"w is torch\.bfloat16 and its gradient torch\.float32"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("release", [True, False])
def test_a_gradient_of_rows_is_as_the_dense_one(release):
    """Rows that are asked for several times in an order of their own, over several buckets."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(1)
        embedding = nn.Embedding(3000, 47, sparse=sparse)
        optimizer = OffloadedAdamW(
            embedding.named_parameters(), release_gradients=release, bucket=2**16, micro_batches=2
        )
        for step in range(3):
            for microbatch in range(2):
                ids = torch.randint(3000, (64,), generator=torch.Generator().manual_seed(step + microbatch))
                embedding(ids.unique()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(embedding.weight.detach().clone())
        optimizer.close()
    assert torch.equal(*found)


def test_a_gradient_that_is_sparse_otherwise_is_refused():
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = OffloadedAdamW([("w", weight)])
    weight.grad = torch.eye(4).to_sparse()
    with pytest.raises(UserError, match=r"w has a gradient of layout sparse_coo: make it dense, or of rows"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("release", [True, False])
def test_a_step_without_any_gradient_says_so(release):
    weights = parameters()
    optimizer = OffloadedAdamW(weights, release_gradients=release)
    with pytest.warns(SkippedStep, match="found no gradient of any parameter") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert optimizer.skipped == 0 and optimizer.counts == {"0": 0, "1": 0}
    optimizer.close()
