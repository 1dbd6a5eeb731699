"""One part of a buffer on its way to or from the disk."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.memory.blocks import Block, BlockFile
from headrace.memory.parts import Part, write_header


class Transfer:
    """One part on its way to or from the disk; several workers take a share of its blocks each."""

    def __init__(self, file: BlockFile, part: Part, blocks: Sequence[Block]) -> None:
        self.part = part
        self._file = file
        self._blocks = blocks
        self._sums = list(part.checksums) or [0] * len(blocks)

    def read(self, worker: int, workers: int) -> None:
        """Read a worker's share of the blocks."""
        for index in range(worker, len(self._blocks), workers):
            self._file.read(self._blocks[index], self._sums[index])

    def write(self, worker: int, workers: int) -> None:
        """Write a worker's share of the blocks."""
        for index in range(worker, len(self._blocks), workers):
            self._sums[index] = self._file.write(self._blocks[index])

    def close(self) -> None:
        """Close the file after reading."""
        self._file.close()

    def finish(self) -> Part:
        """Write the header after all blocks, close the file, and return the part with its checksums."""
        with self._file:
            part = replace(self.part, checksums=tuple(self._sums))
            write_header(self._file, part)
        return part
