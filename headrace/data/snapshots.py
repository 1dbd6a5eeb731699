"""Which files of a data set in the hub's local cache are its training, or its evaluation, split. No torch."""

import re
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import UserError
from headrace.hub import HubName, cache_directory

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_ABOUT = re.compile(r"(dataset_infos?|.*[_-]infos?|config|state)\.json")
"""Files that tell of the data and hold none."""

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that name it in file names, as in the datasets library."""

_WANTED = {"data.train": ("train",), "data.eval": ("validation", "test")}
"""Key of the run file -> the splits that serve it, the first there is."""

_SHARD = re.compile(r"-\d+-of-(\d+)(-[0-9a-f]{8,})?$")


def split_files(hub: HubName, key: str) -> list[Path]:
    """The files of the split that the run file's ``key`` asks for, in the order of their names.

    Raises UserError for a data set that is not in the cache, or not whole, and where it is not clear which
    files are meant.
    """
    snapshot = hub.snapshot([])
    if snapshot is None:
        raise UserError(
            f"{key}: {_named(hub)} is no path here (paths are relative to {Path.cwd()}), and the hub's cache "
            f"({cache_directory()}) has no data set of this name: {hub.command} fetches it, or name a file "
            "or a directory"
        )
    groups: dict[str, list[Path]] = {}
    for path in sorted(_files(snapshot)):
        groups.setdefault(_split_of(path.relative_to(snapshot)) or "", []).append(path)
    found = _chosen(groups, hub, key, snapshot)
    _check_one(found, hub, key, snapshot)
    _check_whole(found, hub, key, snapshot)
    return found


def _named(hub: HubName) -> str:
    return hub.id if hub.revision == "main" else f"{hub.id}@{hub.revision}"


def _files(snapshot: Path) -> Iterator[Path]:
    for path in snapshot.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(snapshot).parts)
        if path.suffix.lower() in _SUFFIXES and not hidden and not _ABOUT.fullmatch(path.name):
            yield path


def _split_of(path: Path) -> str | None:
    """The split that a file's name tells, or that of the directories around it; None where none does."""
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in _SPLITS.items():
            if any(name in words for name in names):
                return split
    return None


def _chosen(groups: dict[str, list[Path]], hub: HubName, key: str, snapshot: Path) -> list[Path]:
    if not groups:
        raise UserError(
            f"{key}: {_named(hub)} has no file of a known type ({', '.join(_SUFFIXES)}) in {snapshot}: fetch "
            f"all of it with {hub.command}, or choose another data set"
        )
    for split in _WANTED[key]:
        if split in groups:
            return groups[split]
    if key == "data.train" and groups.keys() == {""}:
        return groups[""]
    there = ", ".join(_short([path for files in groups.values() for path in files], snapshot))
    wish = " or ".join(_WANTED[key])
    share = ", or hold out a share of the training data with data.eval=0.05" if key == "data.eval" else ""
    raise UserError(f"{key}: {_named(hub)} has no {wish} split but {there}: name files in {snapshot}{share}")


def _short(files: list[Path], snapshot: Path) -> list[str]:
    names = [path.relative_to(snapshot).as_posix() for path in files]
    return names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]


def _check_one(files: list[Path], hub: HubName, key: str, snapshot: Path) -> None:
    """Raise UserError unless all files are parts of one and the same: equal names but for numbers."""
    kinds: dict[str, Path] = {}
    for path in files:
        stem = re.sub(r"\d+", "N", _SHARD.sub("", path.stem))
        kinds.setdefault(f"{path.parent.relative_to(snapshot)}/{stem}{path.suffix}", path)
    if len(kinds) > 1:
        several = ", ".join(_short(list(kinds.values()), snapshot))
        raise UserError(
            f"{key}: it is not clear which files of {_named(hub)} are meant, it has {several}: name the "
            f"files themselves, which lie in {snapshot}"
        )


def _check_whole(files: list[Path], hub: HubName, key: str, snapshot: Path) -> None:
    """Raise UserError where a file is missing beside ``files`` that the hub has."""
    counts = [int(match[1]) for path in files if (match := _SHARD.search(path.stem))]
    patterns = [re.sub(r"\d+", "*", path.relative_to(snapshot).as_posix()) for path in files]
    broken = any(not path.exists() for path in files)
    if broken or any(count != len(files) for count in counts) or hub.snapshot(patterns) is None:
        raise UserError(
            f"{key}: {_named(hub)} is not whole in the hub's cache ({snapshot}): {hub.command} fetches the "
            "rest"
        )
