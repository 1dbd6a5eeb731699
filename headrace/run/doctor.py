"""What a machine has for training, and what of it will be slow, with the reason and the fix."""

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.errors import UserError
from headrace.machine import system
from headrace.machine.cores import auto_threads
from headrace.machine.system import Cores, Memory, Mount
from headrace.memory.disk_speed import DiskSpeed, measure
from headrace.planner.workload import STATE

REQUIRED = ("headrace", "torch", "transformers", "accelerate", "datasets", "tokenizers", "numpy", "pyarrow")
OPTIONAL = {
    "gguf": "gguf",
    "peft": "lora",
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Package -> the extra of Headrace that brings it."""

SLOW_DISK = 200e6
"""Bytes a second below which writing checkpoints takes a noticeable part of a run."""

_GIB = 2**30
_EDGE = 1024  # rows and columns of the matrices by which the processor is measured
_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gluster", "fuse", "drvfs", "afs")
_IN_RAM = ("tmpfs", "ramfs")
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_UNBOUND = ("", "false", "none", "disabled")  # their values that bind nothing
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Accelerator:
    """A card that torch can use; bytes are those of its memory."""

    name: str
    total: int
    free: int
    native_bf16: bool


@dataclass(frozen=True)
class Finding:
    """Something that will be slow."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Health:
    """What was found.

    Attributes:
        versions: package -> version, None where an optional one is missing.
        threads: lane -> threads that a run will take where its file says ``auto``.
        variables: environment variables that speak of threads.
        accelerator: None without one.
        no_accelerator: why there is none; empty where there is one.
        cpu_flops: dtype -> floating point operations a second of a product of two matrices.
        disk: of the directory looked at; None where it could not be measured.
    """

    versions: Mapping[str, str | None]
    cores: Cores
    threads: Mapping[str, int]
    variables: Mapping[str, str]
    memory: Memory
    mount: Mount
    disk: DiskSpeed | None
    accelerator: Accelerator | None
    no_accelerator: str
    cpu_flops: Mapping[str, float]

    def findings(self) -> list[Finding]:
        """What will be slow, the most costly first."""
        return [*_of_compute(self), *_of_threads(self), *_of_memory(self), *_of_disk(self)]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data, the findings too."""
        return {**asdict(self), "findings": [asdict(finding) for finding in self.findings()]}


def examine(path: str | Path = ".") -> Health:
    """Look at this machine; takes a few seconds, of which the disk and the processor have the most.

    Args:
        path: a directory in which runs will lie; at most 256 MiB are written there and removed.

    Raises UserError when there is no such directory.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise UserError(f"there is no directory {path}: give one in which runs will lie")
    cores, (accelerator, reason) = system.cores(), _accelerator()
    threads = {lane: auto.count for lane, auto in auto_threads().items()}
    torch.set_num_threads(threads["compute"])
    return Health(
        versions=_versions(),
        cores=cores,
        threads=threads,
        variables=system.thread_variables(),
        memory=system.memory(),
        mount=system.mount(directory),
        disk=measure(directory),
        accelerator=accelerator,
        no_accelerator=reason,
        cpu_flops={name: _flops(dtype) for name, dtype in _DTYPES.items()},
    )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _accelerator() -> tuple[Accelerator | None, str]:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name, native = torch.cuda.get_device_name(), torch.cuda.get_device_capability() >= (8, 0)
        return Accelerator(name, total, free, native), ""
    there = _DRIVER.exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None and torch.version.hip is None:
        return None, f"torch is a build for CPUs{', but there is an NVIDIA driver' if there else ''}"
    return None, "torch can use none, though there is an NVIDIA driver" if there else "torch finds none"


def _flops(dtype: torch.dtype) -> float:
    """Of the best of a few products; the first ones warm up."""
    a, b = (torch.ones(_EDGE, _EDGE, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2 * _EDGE**3 / best


# -- findings ----------------------------------------------------------------------------------------------


def _of_compute(health: Health) -> Iterator[Finding]:
    if health.no_accelerator.endswith("NVIDIA driver"):
        yield Finding(
            f"the card is not used: {health.no_accelerator}",
            "all computing is left to the CPU",
            "install torch's CUDA build (see pytorch.org); look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        )
    if health.accelerator and not health.accelerator.native_bf16:
        yield Finding(
            f"{health.accelerator.name} has no bf16 units", "bf16 is emulated there", "model.dtype=fp32"
        )
    share = health.cpu_flops["bf16"] / health.cpu_flops["fp32"]
    if health.accelerator is None and share < 0.9:
        yield Finding(
            f"bf16 runs at {share:.2f} of the speed of fp32",
            "the CPU has no instructions for it (avx512_bf16, amx_bf16)",
            "model.dtype=fp32, if there is room for twice the weights and activations",
        )


def _of_threads(health: Health) -> Iterator[Finding]:
    cores, variables = health.cores, health.variables
    if cores.quota is not None and cores.quota < cores.affinity:
        yield Finding(
            f"a run gets the time of {cores.quota:.1f} of {cores.affinity} cores",
            "the cgroup of this process (a container's limit) grants no more",
            "ask for a higher limit",
        )
    if cores.used < cores.affinity and "LOCAL_WORLD_SIZE" in variables:
        yield Finding(
            f"a run takes {cores.used} of {cores.affinity} cores",
            f"LOCAL_WORLD_SIZE={variables['LOCAL_WORLD_SIZE']} says that other ranks take the others",
            "unset LOCAL_WORLD_SIZE if there are none",
        )
    binding = [name for name in _BINDING if variables.get(name, "").lower() not in _UNBOUND]
    if cores.affinity < cores.machine and not binding:
        yield Finding(
            f"this process may use {cores.affinity} of {cores.machine} cores",
            "its affinity was set (taskset, a launcher, a container's cpuset)",
            "start it with the cores that it shall have",
        )
    yield from _of_variables(variables, binding)
    if cores.load is not None and cores.load > 0.5 * cores.machine:
        yield Finding(
            f"other programs wanted {cores.load:.1f} of {cores.machine} cores in the last minute",
            "threads that are part of one operation wait for the slowest",
            "end them, or lower threads.compute and threads.update",
        )


def _of_variables(variables: Mapping[str, str], binding: Sequence[str]) -> Iterator[Finding]:
    if variables.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield Finding(
            "OMP_WAIT_POLICY=active",
            "threads that wait spin, and take the cores from the update and the disks",
            "unset OMP_WAIT_POLICY",
        )
    for name in binding:
        yield Finding(
            f"{name}={variables[name]}",
            "it ties the first thread to one core, and all that are started from it inherit that",
            f"unset {name}",
        )


def _of_memory(health: Health) -> Iterator[Finding]:
    memory = health.memory
    if memory.swap_used > max(_GIB // 4, memory.total // 100):
        yield Finding(
            f"{memory.swap_used / _GIB:.1f} GiB are swapped out",
            "RAM has been full; what comes back from the disk is a thousand times slower",
            "end what fills it, and set memory.host below what is free",
        )
    if memory.available < 0.25 * memory.total:
        yield Finding(
            f"only {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB of RAM are free",
            "memory.host=auto takes no more, so micro-batches and models must be smaller",
            "end what fills it",
        )
    if memory.huge_pages == "never":
        yield Finding(
            "huge pages are off",
            "large tensors are filled page by page, a few times slower",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _of_disk(health: Health) -> Iterator[Finding]:
    mount, disk = health.mount, health.disk
    if mount.kind in _IN_RAM:
        yield Finding(
            f"{mount.path} lies in RAM ({mount.kind})",
            "checkpoints there take memory from the run, and end with the machine",
            "an `out` on a disk",
        )
    if mount.kind.startswith(_NETWORK):
        yield Finding(
            f"{mount.path} lies on {mount.kind}",
            "every checkpoint goes through the network, or through a program beside the system",
            "an `out` on a disk of this machine",
        )
    if disk is None:
        yield Finding(
            f"{mount.path} could not be measured",
            "it cannot be written to, or has hardly any room",
            "choose another `out`, or make room",
        )
    elif disk.write < SLOW_DISK:
        yield Finding(
            f"{mount.path} writes {disk.write / 1e6:.0f} MB/s",
            f"a checkpoint of a model of 1 B parameters takes {checkpoint_seconds(disk):.0f} s",
            "an `out` on a faster disk, or a higher checkpoint.every",
        )


def checkpoint_seconds(disk: DiskSpeed, parameters: float = 1e9) -> float:
    """How long a checkpoint of a model of so many parameters takes to write."""
    return STATE * parameters / disk.write
