"""A run on a system without POSIX's file calls, locks, affinities and mappings, in a process of its own."""

import importlib
import mmap
import os
import pkgutil
import sys

MODULES = ("fcntl", "resource")
CALLS = ("O_DIRECT", "preadv", "pread", "pwritev", "pwrite", "readv", "posix_fadvise", "posix_fallocate")
PLACES = ("sched_getaffinity", "getloadavg")
MAPPING = ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MADV_HUGEPAGE")


def strip():
    """Take away what Windows or macOS lacks, once the libraries that we build on have found what they use."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torch  # noqa: F401
    import transformers

    for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM"):
        getattr(transformers, name)
    for name in MODULES:
        sys.modules[name] = None
    for name in (*CALLS, *PLACES):
        if hasattr(os, name):
            delattr(os, name)
    for name in MAPPING:
        if hasattr(mmap, name):
            delattr(mmap, name)


def run(path, resumed_at):
    """Import everything, train, and train again from a checkpoint on the way."""
    strip()
    import headrace

    for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    headrace.train(path)
    headrace.train(path, [f"checkpoint.resume={resumed_at}"])


if __name__ == "__main__":
    from headrace.memory.process import prepare_process

    prepare_process()
    run(sys.argv[1], int(sys.argv[2]))
