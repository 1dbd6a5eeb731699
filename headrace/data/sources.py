"""Records from text, JSON and Parquet files, each with the place that an error message names. No torch."""

import codecs
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.data.snapshots import split_files
from headrace.data.tally import Tally
from headrace.errors import UserError, reason
from headrace.hub import hub_name

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
BLOCK = 2**16
"""Bytes after which a text file is read on as another block, from the next line that isn't indented."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it stands in a file.

    Attributes:
        place: file and line, as error messages name it.
        fields: what the record holds.
        nbytes: its bytes in the file, for progress.
        first, last: false where it continues, or is continued by, the neighbouring block of one text.
    """

    place: str
    fields: dict[str, Any]
    nbytes: int
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Sources:
    """Files of one kind (``text``, ``json`` or ``parquet``) in reading order."""

    files: tuple[Path, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)


def find_sources(given: str | list[str], key: str) -> Sources:
    """The files that ``given`` names: files, directories searched for files of a known type, or data sets of
    the hub in its local cache, of which ``key`` tells the split.

    Raises UserError naming ``key`` where something is missing, unreadable, named twice, of an unknown type or
    of another type.
    """
    names = [given] if isinstance(given, str) else given
    files: list[Path] = []
    seen: set[Path] = set()
    for name in names:
        found, linked = _found(name, key)
        for group in [found] if linked else [[path] for path in found]:
            _refuse_repeated(group, seen, key)
            seen |= {path.resolve() for path in group}
        files += found
    kinds: dict[str, Path] = {}
    for path in files:
        kinds.setdefault(KINDS[path.suffix.lower()], path)
    if len(kinds) > 1:
        mixed = " and ".join(f"{kind} ({path})" for kind, path in kinds.items())
        raise UserError(f"{key} mixes {mixed}; name files of one type")
    return Sources(tuple(files), next(iter(kinds)))


def _found(name: str, key: str) -> tuple[list[Path], bool]:
    """The files that ``name`` stands for, and whether equal ones among them may be links to one file."""
    try:
        hub = hub_name(name, "dataset")
        if hub is not None:
            return split_files(hub, key), True
        return _files_at(Path(name).expanduser(), key), False
    except (OSError, RuntimeError) as error:  # RuntimeError: whose home is ~name?
        place = getattr(error, "filename", None) or name
        raise UserError(
            f"{key}: {str(place)[:200]} cannot be read ({reason(error)}): name files, or a directory of "
            "them, that you may read"
        ) from error


def _refuse_repeated(files: list[Path], seen: set[Path], key: str) -> None:
    for path in files:
        if path.resolve() in seen:
            raise UserError(f"{key} names {path} twice, so that its records would count twice: name it once")


def _files_at(path: Path, key: str) -> list[Path]:
    known = ", ".join(KINDS)
    if path.is_dir():
        found = sorted(_files_below(path))
        if not found:
            raise UserError(f"{key}: the directory {path} holds no file of a known type ({known})")
        return found
    if not path.is_file():
        relative = "" if path.is_absolute() else f" (paths are relative to {Path.cwd()})"
        raise UserError(f"{key}: there is no file or directory {path}{relative}: name one that is there")
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{key}: {path} is of no known type; name one of {known}")
    return [path]


def _files_below(directory: Path) -> Iterator[Path]:
    """Files of a known type; what is hidden is not searched, and what cannot be searched is an OSError."""

    def stop(error: OSError) -> None:
        raise error

    for place, directories, names in os.walk(directory, onerror=stop):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            if path.suffix.lower() in KINDS and path.is_file():
                yield path


def digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises UserError for a file that the system refuses to open.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be read ({reason(error)}): see that you may read it, or name another file"
    )


def read_records(sources: Sources, tally: Tally) -> Iterator[Record]:
    """Every record in order; what can't be read is rejected in ``tally``.

    Raises UserError for a file that the system refuses to open.
    """
    read = {"text": _read_text, "json": _read_json, "parquet": _read_parquet}[sources.kind]
    for path in sources.files:
        skipped, empty = tally.skipped, True
        try:
            for record in read(path, tally):
                empty = False
                yield record
        except OSError as error:
            raise _unreadable(path, error) from error
        if empty and tally.skipped == skipped:
            tally.reject(str(path), "is empty")


def _decode(raw: bytes, place: str, tally: Tally) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"0x{raw[error.start]:02x}"
        tally.reject(place, f"is not UTF-8 (byte {byte} at column {error.start + 1})")
        return None


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            yield f"{path}:{number}", raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def _read_text(path: Path, tally: Tally) -> Iterator[Record]:
    block: list[str] = []
    place, nbytes, first = f"{path}:1", 0, True
    for here, raw in _lines(path):
        line = _decode(raw, here, tally)
        # Tokens seldom join the end of a line and the next line's first letter, so a division there is free.
        if line and nbytes >= BLOCK and not line[0].isspace():
            yield Record(place, {"text": "".join(block)}, nbytes, first, last=False)
            block, place, nbytes, first = [], here, 0, False
        block.append(line or "")
        nbytes += len(raw)
    text = "".join(block)
    if text.strip() or not first:
        yield Record(place, {"text": text}, nbytes, first)


def _read_json(path: Path, tally: Tally) -> Iterator[Record]:
    if path.suffix.lower() == ".json" and _starts_with_bracket(path):
        yield from _read_json_array(path, tally)
        return
    for place, raw in _lines(path):
        if raw.isspace():
            continue
        for value in _parse(raw, place, tally):
            yield from _record(value, place, len(raw), tally)


def _starts_with_bracket(path: Path) -> bool:
    return next((raw.lstrip()[:1] for _, raw in _lines(path) if raw.strip()), b"") == b"["


def _read_json_array(path: Path, tally: Tally) -> Iterator[Record]:
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for values in _parse(raw, str(path), tally):
        for number, value in enumerate(values, start=1):
            yield from _record(value, f"{path} (record {number})", len(raw) // len(values), tally)


def _parse(raw: bytes, place: str, tally: Tally) -> Iterator[Any]:
    text = _decode(raw, place, tally)
    if text is None:
        return
    try:
        yield json.loads(text)
    except json.JSONDecodeError as error:
        tally.reject(place, f"is not whole, valid JSON ({error.msg} at column {error.colno})")
    except ValueError:  # Python's limit on the digits of an integer
        tally.reject(place, "holds a number of too many digits")
    except RecursionError:
        tally.reject(place, "is nested too deeply")


def _record(value: Any, place: str, nbytes: int, tally: Tally) -> Iterator[Record]:
    if isinstance(value, dict):
        yield Record(place, value, nbytes)
    else:
        tally.reject(place, "is not a JSON object with named fields")


def _read_parquet(path: Path, tally: Tally) -> Iterator[Record]:
    import datasets
    import pyarrow.parquet

    # Streaming writes no copy of the data; its lock files go to a directory that vanishes.
    with tempfile.TemporaryDirectory() as cache:
        try:
            count = pyarrow.parquet.read_metadata(path).num_rows
            if count == 0:
                return
            rows = datasets.load_dataset(
                "parquet", data_files=[str(path)], split="train", streaming=True, cache_dir=cache
            )
            for number, fields in enumerate(rows, start=1):
                yield Record(f"{path} (row {number})", fields, path.stat().st_size // count)
        except (ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
            tally.reject(str(path), f"is not a readable Parquet file ({reason(error)})")
