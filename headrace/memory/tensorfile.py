"""Tensors in a file and back, streamed: the safetensors format without a copy of a whole tensor.

A file is an 8-byte little-endian header length, a JSON header (padded with spaces to a multiple of 8) and the
tensors' bytes without gaps. Format: https://github.com/huggingface/safetensors. Read with pread instead of
mmap, so that reading a tensor adds no more memory than the tensor.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from headrace.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LFS_POINTER = b"version "  # what lies in place of a large file until Git LFS has fetched it begins so
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_BLOCK = 2**18  # elements that are cast, or cross from a device, at a time: they fit into the cache


@dataclass(frozen=True)
class Entry:
    """A tensor to be written.

    Attributes:
        name: its key in the file.
        dtype: what it is stored as; pieces of another dtype are cast on the way.
        shape: its logical shape; ``()`` for a scalar.
        pieces: called once when its turn comes; 1-D contiguous tensors, on any device, whose concatenation is
            the flattened tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> "Entry":
        """The entry of one tensor, stored as ``dtype`` or as it is."""
        return cls(name, dtype or tensor.dtype, tuple(tensor.shape), lambda: [tensor.detach().reshape(-1)])

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What was written: file name without directory, size in bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``start`` and ``stop`` count bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def write_tensors(
    path: str | os.PathLike[str], entries: Sequence[Entry], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a safetensors file and make it durable (fsync of the file, not of its directory).

    The SHA-256 is computed from the bytes handed to the system, not read back. Wide dtypes come first, so
    that every tensor is aligned. Raises OSError (disk full, quota, permissions); what then lies at ``path``
    is torn, and :class:`TensorFile` refuses it.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file:
        for block in _file_blocks(ordered, metadata or {}):
            digest.update(block)
            size += block.nbytes
            while block:
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return FileRecord(Path(path).name, size, digest.hexdigest())


def _file_blocks(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    yield memoryview(_header(entries, metadata))
    for entry in entries:
        written = 0
        for piece in entry.pieces():
            written += piece.numel()
            yield from _piece_blocks(piece, entry.dtype)
        assert written == math.prod(entry.shape), f"{entry.name}: {written} elements for shape {entry.shape}"


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        assert entry.name not in header and entry.name != "__metadata__", f"{entry.name} is named twice"
        offsets = [start, start + entry.nbytes]
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
        start = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _piece_blocks(piece: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    assert piece.dim() == 1 and piece.is_contiguous(), "a piece is 1-D and contiguous"
    if piece.dtype == dtype and piece.is_cpu:
        yield bytes_of(piece)
        return
    for block in piece.split(_BLOCK):
        yield bytes_of(block.to("cpu", dtype))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a 1-D contiguous CPU tensor; numpy lacks bfloat16, so it goes through uint8."""
    return tensor.detach().view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file opened for reading; a context manager.

    Attributes:
        path: as given.
        entries: name -> where it lies, in file order.
        metadata: the header's text pairs.

    Raises UserError for a file that is missing, torn, or not in the format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        except OSError as error:
            raise UserError(f"cannot open the tensor file {self.path}: {error.strerror}") from error
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new CPU tensor with the values of ``name``, as ``dtype`` or as stored."""
        info = self.entries[name]
        tensor = torch.empty(info.shape, dtype=dtype or info.dtype)
        self.read_into(name, [tensor.view(-1)])
        return tensor

    def read_into(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Fill 1-D contiguous tensors, on any device, in order with the elements of ``name``.

        A piece of another dtype than the file's, or on a device, is filled through one small scratch. Raises
        UserError when the file ends early; the pieces must hold exactly the tensor's elements.
        """
        info = self.entries[name]
        position = info.start
        for piece in pieces:
            assert piece.dim() == 1 and piece.is_contiguous(), "a piece is 1-D and contiguous"
            stop = position + piece.numel() * info.dtype.itemsize
            assert stop <= info.stop, f"{name}: the pieces hold more than its {info.numel} elements"
            self._fill(piece, info.dtype, position)
            position = stop
        assert position == info.stop, f"{name}: the pieces hold fewer than its {info.numel} elements"

    def read_range(self, name: str, start: int, piece: torch.Tensor) -> None:
        """Fill one such tensor with elements of ``name`` from element ``start`` on."""
        info = self.entries[name]
        assert start + piece.numel() <= info.numel, f"{name} has only {info.numel} elements"
        self._fill(piece, info.dtype, info.start + start * info.dtype.itemsize)

    def _fill(self, piece: torch.Tensor, dtype: torch.dtype, position: int) -> None:
        piece = piece.detach()
        if piece.dtype == dtype and piece.is_cpu:
            self._read_exactly(bytes_of(piece), position)
            return
        scratch = torch.empty(min(_BLOCK, piece.numel()), dtype=dtype)
        for block in piece.split(_BLOCK) if piece.numel() else ():
            part = scratch[: block.numel()]
            self._read_exactly(bytes_of(part), position)
            block.copy_(part)
            position += part.nbytes

    def _read_exactly(self, target: memoryview, position: int) -> None:
        while target:
            count = self._read_some(target, position)
            if count == 0:
                raise self._damaged(f"it ends at byte {position}, inside a tensor")
            target, position = target[count:], position + count

    def _read_some(self, target: memoryview, position: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], position)
        self._file.seek(position)
        return self._file.readinto(target) or 0

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(8)
        if start == _LFS_POINTER:
            raise UserError(
                f"{self.path} holds no tensors, only a pointer to them of Git LFS: fetch the file with "
                "`git lfs pull` or `hf download`"
            )
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise self._damaged(f"its {size} bytes cannot hold a header of {length}")
        try:
            header = json.loads(self._file.read(length))
            metadata = dict(header.pop("__metadata__", {}))
            entries = {name: _info(record, 8 + length) for name, record in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its header is not valid ({error})") from error
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        self._check_layout(entries, 8 + length, size)
        return entries, metadata

    def _check_layout(self, entries: Mapping[str, TensorInfo], position: int, size: int) -> None:
        for name, info in entries.items():
            nbytes = info.numel * info.dtype.itemsize
            if info.start != position or info.stop - info.start != nbytes:
                raise self._damaged(f"the place of {name} does not fit its shape and neighbours")
            position = info.stop
        if position != size:
            raise self._damaged(f"it has {size} bytes where its header promises {position}")

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self.path} is not a complete safetensors file: {reason}; copy or write it again")


def _info(record: dict[str, Any], data_start: int) -> TensorInfo:
    if record["dtype"] not in DTYPES:
        raise ValueError(f"dtype {record['dtype']} is not supported")
    shape, (start, stop) = tuple(record["shape"]), record["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"shape {shape} at {start}:{stop}")
    return TensorInfo(DTYPES[record["dtype"]], shape, data_start + start, data_start + stop)


def sha256_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file in hex, read in small blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
