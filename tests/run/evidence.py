"""What a run left in its directory, in forms by which two runs are compared."""

import json
from pathlib import Path

import yaml
from safetensors.torch import load_file

from headrace.memory.tensorfile import sha256_of
from headrace.training.metrics import read_metrics

TIMES = {"seconds", "stall", "held"}
"""What the machine's load decides, not the run."""


def home(path):
    """The directory of the run of a run file, or the directory itself."""
    path = Path(path)
    return Path(yaml.safe_load(path.read_text(encoding="utf-8"))["out"]) if path.is_file() else path


def weights(path):
    """The saved model, byte by byte."""
    return sha256_of(home(path) / "model" / "model.safetensors")


def tensors(path):
    """The saved model's tensors by name."""
    return load_file(home(path) / "model" / "model.safetensors")


def metrics(path):
    """Every step's record, without times."""
    records = read_metrics(home(path) / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def steps(path):
    """The steps of which a checkpoint stands."""
    found = (checkpoint.name.split("-")[1] for checkpoint in home(path).glob("checkpoint-*"))
    return sorted(int(step) for step in found if step.isdigit())


def states(path, step=None):
    """Every table of the newest (or the given) checkpoint, byte by byte."""
    files = checkpoint(path, step).glob("*.safetensors")
    return {file.stem: sha256_of(file) for file in files}


def table(path, name, step=None):
    """One table of a checkpoint, as tensors by parameter name."""
    return load_file(checkpoint(path, step) / f"{name}.safetensors")


def state(path, step=None):
    """What a checkpoint holds beside its tables."""
    return json.loads((checkpoint(path, step) / "state.json").read_text(encoding="utf-8"))


def checkpoint(path, step=None):
    return home(path) / f"checkpoint-{steps(path)[-1] if step is None else step}"


def all_of(path):
    """All by which a run is judged: weights, states, metrics."""
    return weights(path), states(path), metrics(path)
