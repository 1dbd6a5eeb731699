"""What the process occupies, and settings of the allocator and of OpenMP that keep it predictable."""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_RETURNED_FROM = 2**20
"""Freed blocks of at least this size go back to the system at once (bytes)."""


def prepare_process() -> None:
    """Settings for a process that Headrace owns; must run before torch is imported.

    OpenMP threads that wait spin by default, and take the cores from the lanes beside them: passive waiting
    costs little alone and much less when shared. Huge pages make large CPU tensors cheap to touch.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _return_freed_memory()


def _return_freed_memory() -> None:
    """glibc keeps freed blocks for later, so peaks of different moments would add up."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM)
        libc.mallopt(_M_TRIM_THRESHOLD, _RETURNED_FROM)


def peak_resident_bytes() -> int:
    """Highest resident bytes of this process so far; 0 where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return _peak_by_rusage()


def _peak_by_rusage() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
