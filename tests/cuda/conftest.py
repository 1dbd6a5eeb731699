"""These tests need a CUDA device; elsewhere each is skipped and says so."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
