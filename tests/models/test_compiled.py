"""Compiled layers against the same layers as they are, and systems without a compiler."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import UserError
from headrace.models.attention import attach
from headrace.models.compiled import compile_layers
from headrace.models.recompute import recompute_layers

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PARTS = {"llama": 3 * 3, "gemma2": 3 * 5, "mixtral": 3 * 2}
"""Norms and feed-forward parts of three layers; a mixture's experts are left as they are."""
ROUNDINGS = 3 * 3 * 16
"""Between a weight and its gradient: three layers of about 16 operations, one forward and two backward."""


def build(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES), dtype=torch.float32)
    attach(model)
    return model.train()


def loss_and_gradients(model, length):
    ids = torch.arange(2 * length).view(2, length) * 7 % 97
    model.zero_grad()
    loss = model(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", PARTS)
def test_loss_and_gradients_are_equal_to_rounding(family, recomputed):
    model = build(family)
    expected = {length: loss_and_gradients(model, length) for length in (24, 17)}
    if recomputed:
        recompute_layers(model)
    torch._dynamo.reset()
    counters.clear()
    assert compile_layers(model) == PARTS[family]
    for length, (loss, gradients) in expected.items():
        found, theirs = loss_and_gradients(model, length)
        torch.testing.assert_close(found, loss, rtol=4 * 2**-24, atol=0)
        for name, gradient in gradients.items():
            worst = (theirs[name] - gradient).abs().max() / gradient.abs().max()
            assert worst <= ROUNDINGS * 2**-24, name
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match=r"train\.compile=true: Linear has no layers"):
        compile_layers(Bare(4, 4))


class Bare(torch.nn.Linear):
    """As a model of remote code may be: nothing in it is a layer that transformers knows."""

    device = torch.device("cpu")


Bare.__name__ = "Linear"


def test_without_a_compiler_it_is_refused(tmp_path):
    code = (
        "import torch\n"
        "from headrace.errors import UserError\n"
        "from headrace.models.compiled import compile_layers\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model.device = torch.device('cpu')\n"
        "try: compile_layers(model)\n"
        "except UserError as error: print(error)\n"
    )
    environment = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.startswith("train.compile=true needs a C++ compiler"), done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("or set train.compile=false")
    assert done.stdout.count("\n") == 1
