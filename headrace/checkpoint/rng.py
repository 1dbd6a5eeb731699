"""The state of every random number generator that training draws from, as JSON-able data."""

import random
import warnings
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_rng() -> dict[str, Any]:
    """The states of Python, numpy, torch on the CPU and torch on every CUDA device."""
    version, words, gauss = random.getstate()
    numbers: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**numbers, "state": {**numbers["state"], "key": numbers["state"]["key"].tolist()}},
        "torch": _to_text(torch.get_rng_state()),
        "cuda": [_to_text(state) for state in _cuda_states()],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to what :func:`capture_rng` returned, also after a round trip through JSON.

    Warns when the number of CUDA devices differs: those that are here and were there are set.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_from_text(state["torch"]))
    devices = len(_cuda_states())
    if devices != len(state["cuda"]):
        warnings.warn(f"random states of {len(state['cuda'])} CUDA devices, {devices} are here", stacklevel=2)
    for device, text in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_from_text(text), device)


def _cuda_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _to_text(state: Tensor) -> str:
    return b64encode(state.numpy().tobytes()).decode("ascii")


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.uint8)
