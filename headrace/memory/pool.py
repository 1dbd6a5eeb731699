"""Host buffers of exactly the size asked for, within a budget, in huge pages, pinned for an accelerator."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from headrace.memory.budget import Budget


class HostPool:
    """Hands out flat host tensors; each is its own mapping, so giving one back returns it to the system.

    torch rounds pinned blocks up to powers of two and keeps freed memory; a mapping of our own, registered
    with CUDA where there is one, does neither.

    Args:
        budget: refuses what would exceed the tier.
        pin: whether to register the buffers with CUDA for asynchronous copies.
    """

    def __init__(self, budget: Budget, pin: bool = False) -> None:
        self.budget = budget
        self._pin = pin
        self._purposes: dict[int, tuple[str, int]] = {}

    def take(self, numel: int, dtype: torch.dtype, purpose: str, what: str) -> Tensor:
        """A zeroed 1-D tensor of ``numel`` elements.

        Raises:
            UserError: if the budget has no room; ``what`` names the buffer in the message.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        self.budget.reserve(purpose, nbytes, what)
        buffer = torch.frombuffer(map_bytes(nbytes), dtype=dtype, count=numel)
        if self._pin:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)))
        self._purposes[buffer.data_ptr()] = (purpose, nbytes)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a tensor that :meth:`take` handed out; its memory goes when the last reference does."""
        if buffer.numel() == 0:
            return
        purpose, nbytes = self._purposes.pop(buffer.data_ptr())
        if self._pin:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())))
        self.budget.release(purpose, nbytes)


def map_bytes(nbytes: int) -> mmap.mmap:
    """Zeroed memory of its own that begins on a page, in huge pages where there are any."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, nbytes)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: small ones do, only slower
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
