"""The file of one part of a buffer: safetensors whose header fills whole blocks of the disk.

A buffer is a few flat tables of equal length; a part holds elements ``low:high`` of each. The header says
which they are, and a checksum for every block that follows; it is written last.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import RunStopped, UserError
from headrace.memory.blocks import ALIGN, BLOCK, Block, BlockFile, Watch, aligned, cut
from headrace.memory.pool import map_bytes
from headrace.memory.tensorfile import CODES, DTYPES, bytes_of

FORMAT = "headrace-blocks-1"
DIGITS = 16  # of a checksum in hex


@dataclass(frozen=True)
class Form:
    """What a buffer is made of.

    Attributes:
        tables: name -> dtype, in the order in which they lie in a file.
        numel: elements of each table.
        notes: what the owner wants to find in the header again.
    """

    tables: Mapping[str, torch.dtype]
    numel: int
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.numel * sum(dtype.itemsize for dtype in self.tables.values())


@dataclass(frozen=True)
class Part:
    """Elements ``low:high`` of every table of a buffer; ``checksums`` of its blocks once it is written."""

    form: Form
    low: int
    high: int
    checksums: tuple[int, ...] = ()

    @property
    def lengths(self) -> dict[str, int]:
        """Table -> bytes in the file; whole blocks of the disk each, the last one filled up."""
        return {name: aligned((self.high - self.low) * d.itemsize) for name, d in self.form.tables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, without what fills the last blocks up."""
        return (self.high - self.low) * sum(dtype.itemsize for dtype in self.form.tables.values())

    @property
    def blocks(self) -> int:
        """How many blocks follow the header."""
        return sum(-(-length // BLOCK) for length in self.lengths.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header()) + sum(self.lengths.values())

    def header(self) -> bytes:
        """The header, padded with spaces to whole blocks of the disk; its length does not depend on sums."""
        sums = self.checksums or (0,) * self.blocks
        notes = {
            **self.form.notes,
            "format": FORMAT,
            "numel": str(self.form.numel),
            "low": str(self.low),
            "high": str(self.high),
            "block": str(BLOCK),
            "xxh3_64": "".join(f"{value:0{DIGITS}x}" for value in sums),
        }
        body: dict[str, Any] = {"__metadata__": notes}
        start = 0
        for name, length in self.lengths.items():
            dtype = self.form.tables[name]
            shape, offsets = [length // dtype.itemsize], [start, start + length]
            body[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": offsets}
            start += length
        text = json.dumps(body, separators=(",", ":")).encode()
        text += b" " * (aligned(8 + len(text)) - 8 - len(text))
        return len(text).to_bytes(8, "little") + text

    def cut(self, tables: Mapping[str, Tensor]) -> list[Block]:
        """The blocks of this part of a buffer in memory: 1-D tables that begin at its first element.

        Their memory must be as long as whole blocks of the disk.
        """
        blocks, offset = [], len(self.header())
        for name, length in self.lengths.items():
            itemsize = self.form.tables[name].itemsize
            memory = bytes_of(tables[name])[self.low * itemsize : self.low * itemsize + length]
            assert memory.nbytes == length, (name, memory.nbytes, length)
            blocks += cut(memory, offset)
            offset += length
        return blocks


def read_part(path: Path) -> tuple[Part, int]:
    """The part that a file says it holds, and the length of its header in bytes.

    Raises UserError for a file that is not one of these.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if (8 + length) % ALIGN or length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes")
            body = json.loads(file.read(length))
        notes = body.pop("__metadata__")
        if notes.pop("format") != FORMAT or int(notes.pop("block")) != BLOCK:
            raise ValueError("another format")
        numel, low, high = (int(notes.pop(key)) for key in ("numel", "low", "high"))
        sums = notes.pop("xxh3_64")
        checksums = tuple(int(sums[i : i + DIGITS], 16) for i in range(0, len(sums), DIGITS))
        form = Form({name: DTYPES[record["dtype"]] for name, record in body.items()}, numel, notes)
        part = Part(form, low, high, checksums)
        if len(checksums) != part.blocks or path.stat().st_size != part.file_bytes:
            raise ValueError("not as long as its header says")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a whole file of blocks ({error}): bring a copy back") from error
    return part, 8 + length


def sealed(path: Path) -> str:
    """SHA-256 of a file's header, which seals all of its blocks."""
    _, length = read_part(path)
    with path.open("rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()


def write_header(file: BlockFile, part: Part) -> None:
    """Write the header of a part whose blocks are all written."""
    header = part.header()
    region = map_bytes(len(header))
    region[:] = header
    file.write(Block(memoryview(region), 0))


def verify(path: Path, watch: Watch) -> None:
    """Read every block of a file and compare it with its checksum, in little memory.

    Raises UserError or RunStopped naming the file and what is wrong.
    """
    part, start = read_part(path)
    scratch = memoryview(map_bytes(BLOCK))
    with BlockFile(path, watch, writing=False) as file:
        offset, sums = start, iter(part.checksums)
        for length in part.lengths.values():
            for low in range(0, length, BLOCK):
                file.read(Block(scratch[: min(BLOCK, length - low)], offset + low), next(sums))
            offset += length


__all__ = ["Form", "Part", "RunStopped", "read_part", "verify", "write_header"]
