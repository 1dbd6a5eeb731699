import os
import sys

import pytest


@pytest.fixture
def no_fsync(monkeypatch):
    """For tests of many saves that no power cut can meet."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def peak_memory():
    """Calls a function; returns the bytes by which the highest resident size rose above that before it."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip(f"{sys.platform} does not reset the peak of a process")

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

    def measure(call):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS")
        call()
        return status("VmHWM") - before

    return measure
