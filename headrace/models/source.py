"""What a model path is, and its configuration as plain data; imports no torch: planning is fast."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headrace.errors import UserError, reason
from headrace.hub import HubName, cache_directory, hub_name

WEIGHTS = "model.safetensors"
"""The one file of a model that is not sharded."""

INDEX = "model.safetensors.index.json"
"""The file that says in which shard each tensor lies."""

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file: a directory that has it holds an adapter."""

_MANIFEST = "manifest.json"  # of a checkpoint of ours

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.safetensors", "*.gguf")


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: ``directory``, ``gguf``, or ``config`` (weights are drawn at random).
        path: the directory; for ``gguf`` and ``config`` the file.
        weights: the safetensors files of a directory; none where only its configuration was fetched.
        hub: its name where the directory is a snapshot in the hub's local cache.
    """

    kind: Literal["directory", "gguf", "config"]
    path: Path
    weights: tuple[Path, ...] = ()
    hub: HubName | None = None

    @property
    def directory(self) -> Path:
        """Where files beside the weights lie: tokenizer, generation config."""
        return self.path if self.kind == "directory" else self.path.parent

    @property
    def has_weights(self) -> bool:
        """Whether there is more than a configuration."""
        return self.kind == "gguf" or bool(self.weights)


def find_source(path: str | Path) -> Source:
    """Classify a model path, or the name of a model of the hub, which is looked for in the local cache.

    Raises UserError for what is none of the three kinds or not in the cache, for weights in another format
    than safetensors, for an incomplete set of shards and for what the system refuses to open.
    """
    try:
        return _classify(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: whose home is ~name?
        raise UserError(
            f"model.path={str(path)[:200]} cannot be read ({reason(error)}): give a model directory, a "
            ".gguf file or a config.json that you may read"
        ) from error


def pinned(path: str) -> str:
    """A model path as it is; the name of a model of the hub with the commit of its snapshot in the cache.

    Raises UserError as :func:`find_source` does.
    """
    source = find_source(path)
    return path if source.hub is None else f"{source.hub.id}@{source.path.name}"


def _classify(path: str | Path) -> Source:
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        return Source("gguf", place)
    if place.suffix == ".json" and place.is_file():
        return Source("config", place)
    hub = hub_name(str(path), "model")
    if hub is not None:
        snapshot = hub.snapshot(["config.json"])
        if snapshot is None:
            raise UserError(
                f"model.path={path} is no path here, and the hub's cache ({cache_directory()}) has no model "
                f"of this name: {hub.command} fetches it, or give a model directory, a .gguf file or a "
                "config.json"
            )
        place = snapshot
    if (place / ADAPTER_CONFIG).is_file():
        base = adapter_base(place) or "its base model"
        raise UserError(
            f"model.path={path} holds an adapter, not a whole model: give model.path={base}, or a model that "
            "the adapter was merged into with headrace export RUN OUT --merge"
        )
    if not (place / "config.json").is_file():
        raise UserError(_not_a_model(str(path), place))
    return Source("directory", place, _weight_files(place, hub), hub)


def require_weights(source: Source) -> None:
    """Raise UserError for a directory that lacks the weights of its configuration."""
    if source.kind == "directory" and not source.has_weights:
        fetch = f"fetch {WEIGHTS} too" if source.hub is None else f"{source.hub.command} fetches them"
        raise UserError(
            f"{source.path} has a config.json but no weights: {fetch}, or give "
            f"{source.path / 'config.json'} itself to train from scratch"
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The model's ``config.json`` as a dict, or the same keys from a GGUF file's metadata.

    Raises UserError as :func:`find_source` does, and for quantised models and models that need remote code.
    """
    source = find_source(path)
    if source.kind == "gguf":
        status = source.path.stat()
        return dict(_gguf_config(source.path, status.st_mtime_ns, status.st_size))
    file = source.path / "config.json" if source.kind == "directory" else source.path
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{file} has no model_type; it must be the config.json of a transformers model")
    _refuse_quantised(config, file)
    _refuse_remote_code(config, file)
    return config


def is_adapter(path: str | Path) -> bool:
    """Whether a path is a directory with an adapter of PEFT."""
    try:
        return (Path(path).expanduser() / ADAPTER_CONFIG).is_file()
    except (OSError, RuntimeError):  # what is wrong with the path, find_source says
        return False


def adapter_base(directory: str | Path) -> str | None:
    """The path or the name of the model that an adapter was trained beside, as its configuration has it."""
    config = read_json(Path(directory).expanduser() / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if revision and base and hub_name(str(base), "model"):
        return f"{base}@{revision}"
    return str(base) if base else None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; raises UserError naming the file when it holds something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON ({reason(error)}): fetch it again") from error
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(data).__name__}")
    return data


def _not_a_model(path: str, place: Path) -> str:
    given = f"model.path={path}"
    if not place.exists():
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        return f"{given} does not exist{where}; give a model directory, a .gguf file or a config.json"
    if not place.is_dir():
        return f"{given} is neither a .gguf file nor a config.json: give one of them, or a model directory"
    if (place / "model" / "config.json").is_file():
        return f"{given} has no config.json, for it is a run: give {place / 'model'}"
    if (place / _MANIFEST).is_file():
        return (
            f"{given} has no config.json, for it is a checkpoint: `headrace export {place.parent} OUT` makes "
            "a model of it"
        )
    if files := sorted(file.name for file in place.glob("*.gguf")):
        return f"{given}: the directory has no config.json: give its {place / files[0]}"
    return f"{given}: the directory has no config.json, so it is no model: give one that has it"


def _weight_files(directory: Path, hub: HubName | None) -> tuple[Path, ...]:
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map, which names the tensors' files; fetch it again")
        names = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            fetch = "fetch the model again" if hub is None else f"{hub.command} fetches the rest"
            raise UserError(
                f"{directory} lacks {len(absent)} of the {len(names)} files named in {INDEX}, first "
                f"{absent[0]}; {fetch}"
            )
        return tuple(directory / name for name in names)
    if (directory / WEIGHTS).is_file():
        return (directory / WEIGHTS,)
    others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in directory.glob(pattern))
    if others:
        raise UserError(
            f"{directory} has {others[0]} but neither {WEIGHTS} nor {INDEX}; convert it with transformers "
            "(from_pretrained, then save_pretrained)"
        )
    return ()


def _refuse_quantised(config: dict[str, Any], file: Path) -> None:
    nested = config.get("text_config")
    parts = [config, nested] if isinstance(nested, dict) else [config]
    keys = ("quantization_config", "compression_config")  # the second is compressed-tensors' older one
    quantised = next((part[key] for part in parts for key in keys if part.get(key)), None)
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{file}: the model is quantised ({method}), and full fine-tuning needs its real weights; "
            "give the unquantised model"
        )


def _refuse_remote_code(config: dict[str, Any], file: Path) -> None:
    if not config.get("auto_map"):
        return
    from transformers import CONFIG_MAPPING  # after a rare condition: it takes seconds

    if config["model_type"] not in CONFIG_MAPPING:
        raise UserError(
            f"{file}: model_type {config['model_type']} needs code from its own repository (auto_map), which "
            "is never run; give a model that transformers supports itself"
        )


@lru_cache(maxsize=1)  # the plan and the loader ask for the same file, and parsing it takes seconds
def _gguf_config(file: Path, mtime_ns: int, size: int) -> dict[str, Any]:
    try:
        import gguf  # noqa: F401  transformers asks for it too, in many more words
        from transformers import PreTrainedConfig
    except ImportError as error:
        raise UserError(f"{file}: reading GGUF needs the gguf package: pip install headrace[gguf]") from error
    try:
        config, _ = PreTrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
    except Exception as error:
        raise UserError(f"{file} cannot be read as a GGUF model ({reason(error)}): fetch it again") from error
    config.pop("_model_name_or_path", None)
    return dict(config)
