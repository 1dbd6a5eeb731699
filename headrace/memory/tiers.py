"""What one rank holds and moves bytes with: budgets of its tiers, pools, its disk store, its lanes."""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from headrace.config import parse_size
from headrace.lanes.lanes import Lanes
from headrace.ledger import Ledger
from headrace.memory.budget import Budget
from headrace.memory.disk import DiskPath, DiskStore
from headrace.memory.pool import HostPool


class DevicePool:
    """Hands out flat tensors on an accelerator within its budget.

    Args:
        budget: refuses what would exceed the tier.
        device: where the tensors are.
    """

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self.budget = budget
        self._device = device
        self._purposes: dict[int, str] = {}

    def take(self, numel: int, dtype: torch.dtype, purpose: str, what: str) -> Tensor:
        """A zeroed 1-D tensor; raises UserError, naming ``what``, if the budget has no room."""
        self.budget.reserve(purpose, numel * dtype.itemsize, what)
        buffer = torch.zeros(numel, dtype=dtype, device=self._device)
        self._purposes[buffer.data_ptr()] = purpose
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a tensor that :meth:`take` handed out; its memory goes when the last reference does."""
        if buffer.numel():
            self.budget.release(self._purposes.pop(buffer.data_ptr()), buffer.nbytes)


class Tiers:
    """The memory tiers of one rank and its lanes; they go with the object, or with :meth:`close`.

    Args:
        device: where compute happens.
        ledger: account to book in.
        host: budget of host memory; None for no limit.
        accelerator: budget of the device's memory; None for no limit. With a CPU as the device, a budget
            sets a device pool apart from host memory: a device to try limits with where there is none.
        disk: paths of the disk tier; none for no such tier.
        workers: threads of the ``cpu`` lane.
        links: bytes a second to which the lanes ``d2h`` and ``h2d`` are held, of a link to try plans with.
        rank: of this process among the ``ranks`` that share the paths of the disk.
        ranks: how many do.

    Attributes:
        host: budget of the tier that holds states.
        device_budget: budget of the tier that holds what is computed with; ``host`` without accelerator.
        pool: hands out host memory.
        device_pool: hands out memory of the device.
        disk: the disk store, if there is one.
        lanes: the lanes.
        apart: whether device and host memory are two.

    Raises:
        UserError: a path of the disk cannot be used.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: Ledger,
        *,
        host: int | str | None = None,
        accelerator: int | str | None = None,
        disk: Sequence[DiskPath] = (),
        workers: int = 1,
        links: Mapping[str, float] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        on_cpu = device.type == "cpu"
        self.apart = not on_cpu or accelerator is not None
        self.host = Budget("host" if self.apart else "ram", _limit(host), ledger, "memory.host")
        self.device_budget = self.host
        if self.apart:
            self.device_budget = Budget("device", _limit(accelerator), ledger, "memory.device")
        self.pool = HostPool(self.host, pin=not on_cpu)
        self.device_pool: HostPool | DevicePool = DevicePool(self.device_budget, device)
        if on_cpu:
            self.device_pool = HostPool(self.device_budget)
        self.disk: DiskStore | None = None
        with ExitStack() as resources:
            if disk:
                self.disk = DiskStore(disk, _disk_budget(disk, ledger), rank, shared=ranks > 1)
                resources.callback(self.disk.close)
            self.lanes = Lanes(device, ledger, workers, links)
            resources.callback(self.lanes.close)
            if self.disk:
                self.lanes.watch = self.disk.watch.check
            self._end = weakref.finalize(self, release, resources.pop_all(), self.lanes, os.getpid())

    def close(self) -> None:
        """End the threads, remove the files, once. What took memory from the pools must be closed before."""
        self._end()


def release(resources: ExitStack, lanes: Lanes, process: int) -> None:
    """Close resources of ``process`` from wherever Python frees their owner: lanes cannot end themselves."""
    if os.getpid() != process:
        return  # a fork has neither the threads nor the pinned memory
    if lanes.inside():  # the garbage collector runs in any thread, and none can wait for its own end
        threading.Thread(target=resources.close, name="headrace-end", daemon=True).start()
    else:
        resources.close()


def _limit(size: int | str | None) -> int | None:
    return None if size is None else parse_size(size)


def _disk_budget(paths: Sequence[DiskPath], ledger: Ledger) -> Budget:
    sizes = [path.size for path in paths if path.size is not None]
    limit = sum(sizes) if len(sizes) == len(paths) else None
    return Budget("disk", limit, ledger, "memory.disk")
