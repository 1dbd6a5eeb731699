"""Loading and saving take at most twice the largest tensor beyond the model, in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc"),
]

SIZES = {
    "vocab_size": 24000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MEASURE = """
import json, sys
import torch
from headrace.models.load import load_model
from headrace.models.save import model_entries, save_model

def kib(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))

def measured(work):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = kib("VmRSS")
    result = work()
    return result, (kib("VmHWM") - before) * 1024

tiny, model, target, dtype = sys.argv[1:]
torch.set_num_threads(1)
loaded = load_model(tiny)  # what is imported on first use
save_model(target + "-tiny", model_entries(loaded.model), loaded.model.config)
loaded, load_peak = measured(lambda: load_model(model, getattr(torch, dtype)))
entries = model_entries(loaded.model)
_, save_peak = measured(lambda: save_model(target, entries, loaded.model.config, max_shard_bytes=10**8))
sizes = [parameter.nbytes for parameter in loaded.model.parameters()]
extra = {"load": load_peak - sum(sizes), "save": save_peak}
print(json.dumps({**extra, "model": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shards", ["5GB", "60MB"])
def test_extra_memory(tmp_path, dtype, shards):
    build("llama").save_pretrained(tmp_path / "tiny")
    build("llama", torch.bfloat16, **SIZES, tie_word_embeddings=True).save_pretrained(
        tmp_path / "model", max_shard_size=shards
    )
    paths = [str(tmp_path / name) for name in ("tiny", "model", "out")]
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths, dtype], capture_output=True, text=True, check=True
    ).stdout
    measured = json.loads(output.splitlines()[-1])
    print(measured)
    assert measured["model"] > 200 * 2**20
    assert measured["load"] <= 2 * measured["largest"]
    assert measured["save"] <= 2 * measured["largest"]
