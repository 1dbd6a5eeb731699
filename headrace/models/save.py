"""Models out: a plain Hugging Face directory, written aside, read back, renamed."""

import copy
import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headrace.errors import UserError
from headrace.memory.durable import sync_directory
from headrace.memory.tensorfile import Entry, TensorFile, write_tensors
from headrace.models.published import Pieces, Stretch, pieces_of, published_names
from headrace.models.source import INDEX, WEIGHTS, find_source

SHARD_BYTES = 5 * 10**9
"""Most bytes of tensors in one file."""

_BLOCK = 2**20  # elements compared at a time


def model_entries(
    model: PreTrainedModel, dtype: torch.dtype | None = None, pieces: Pieces | None = None
) -> list[Entry]:
    """The tensors of a model as ``save_pretrained`` would write them: published names, tied weights once.

    Floating tensors are stored as ``dtype`` when it is given; nothing is copied until an entry is written.
    ``pieces`` gives what lives elsewhere, as that of :class:`headrace.models.streaming.Streamed` does.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    dropped = {*tied, *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    published: dict[str, list[tuple[str, Stretch]]] = {}
    for name, stretch in published_names(model).items():
        published.setdefault(stretch.name, []).append((name, stretch))
    return [
        _entry(name, tensor, stretch, dtype, pieces)
        for own, tensor in model.state_dict().items()
        if own not in dropped
        for name, stretch in sorted(published[own], key=lambda found: found[1].start)
    ]


def _entry(
    name: str, tensor: torch.Tensor, stretch: Stretch, dtype: torch.dtype | None, pieces: Pieces | None
) -> Entry:
    stored = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Entry(name, stored, stretch.shape, partial(_pieces, tensor, stretch, pieces))


def _pieces(tensor: torch.Tensor, stretch: Stretch, elsewhere: Pieces | None) -> Iterable[torch.Tensor]:
    return pieces_of(stretch.name, tensor, elsewhere, stretch.start, stretch.stop)


def save_model(
    directory: str | Path,
    entries: Sequence[Entry],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    before_replacing: Callable[[Path], None] | None = None,
) -> int:
    """Write a directory that ``from_pretrained`` loads, and return how many tensors were read back and equal.

    All of it is written into a hidden directory beside the target, fsynced, compared with ``entries`` and
    then renamed, so the target is never incomplete. ``entries`` may stream from anywhere, or be those of
    :func:`model_entries`; their pieces are asked for twice. ``before_replacing`` is given the hidden
    directory once it is complete. Raises UserError when the target exists and ``overwrite`` is not set,
    OSError when the disk is full or what it gives back differs; the target is then as before.
    """
    assert entries, "a model without tensors"
    with written_aside(directory, overwrite, before_replacing) as aside:
        _write_weights(aside, entries, max_shard_bytes)
        _write_settings(aside, _stored_config(config, entries), tokenizer, generation_config)
        return verify_model(aside, entries)


@contextmanager
def written_aside(
    directory: str | Path, overwrite: bool = False, before_replacing: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """A hidden directory beside the target that at the end of the block takes its place, synced, or vanishes.

    ``before_replacing`` is given it once it is complete. Raises UserError when the target exists and
    ``overwrite`` is not set.
    """
    target = Path(directory)
    _check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.saving")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _sync(aside)
        if before_replacing is not None:
            before_replacing(aside)
        _replace(target, aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        if overwrite or not any(target.iterdir()):
            return
    elif not target.exists():
        return
    raise UserError(f"{target} exists already; choose another directory or delete it")


def verify_model(directory: str | Path, entries: Sequence[Entry]) -> int:
    """Compare a directory's tensors with ``entries``: names, shapes, dtypes and every byte.

    Returns the number of tensors; raises OSError naming the first that differs.
    """
    return verify_tensors(find_source(directory).weights, entries)


def verify_tensors(weights: Sequence[Path], entries: Sequence[Entry]) -> int:
    """As :func:`verify_model`, of the safetensors files of one directory."""
    stored: dict[str, Path] = {}
    for path in weights:
        with TensorFile(path) as file:
            stored |= dict.fromkeys(file.entries, path)
    wanted = {entry.name: entry for entry in entries}
    if differing := sorted(stored.keys() ^ wanted.keys()):
        raise _differs(weights[0].parent, differing[0])
    for path in weights:
        with TensorFile(path) as file:
            for name in file.entries:
                if not _is_equal(file, wanted[name]):
                    raise _differs(path, name)
    return len(wanted)


def _differs(path: Path, name: str) -> OSError:
    return OSError(errno.EIO, f"{name} was read back other than it was written", str(path))


def _is_equal(file: TensorFile, entry: Entry) -> bool:
    info = file.entries[entry.name]
    if (info.dtype, info.shape) != (entry.dtype, entry.shape):
        return False
    equal = []

    def blocks() -> Iterator[torch.Tensor]:
        # The reader asks for the next block after it has filled the one before.
        for piece in entry.pieces():
            for block in piece.detach().split(_BLOCK) if piece.numel() else ():
                found = torch.empty(block.numel(), dtype=entry.dtype)
                yield found
                written = block.to("cpu", entry.dtype)
                equal.append(torch.equal(found.view(torch.uint8), written.view(torch.uint8)))

    file.read_into(entry.name, blocks())
    return all(equal)


def _write_weights(directory: Path, entries: Sequence[Entry], max_shard_bytes: int) -> None:
    shards = _shards(entries, max_shard_bytes)
    if len(shards) == 1:
        write_tensors(directory / WEIGHTS, entries, {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / name, shard, {"format": "pt"})
        weight_map |= {entry.name: name for entry in shard}
    metadata = {"total_size": sum(entry.nbytes for entry in entries)}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    (directory / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(entries: Sequence[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    """Consecutive entries, each shard at most ``max_shard_bytes`` unless it is one larger tensor."""
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def _stored_config(config: PreTrainedConfig, entries: Sequence[Entry]) -> PreTrainedConfig:
    nbytes: Counter[torch.dtype] = Counter()
    for entry in entries:
        if entry.dtype.is_floating_point:
            nbytes[entry.dtype] += entry.nbytes
    stored = copy.deepcopy(config)
    for part in (stored, stored.get_text_config()):
        part.dtype = str(max(nbytes, key=lambda dtype: nbytes[dtype])).removeprefix("torch.")
    return stored


def _write_settings(
    directory: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: GenerationConfig | None,
) -> None:
    config.save_pretrained(directory)
    if generation_config is not None:
        # save_pretrained would refuse what it finds odd, after hours of training; it was loaded as it is.
        generation_config.to_json_file(directory / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(directory)


def _replace(target: Path, aside: Path) -> None:
    old = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
