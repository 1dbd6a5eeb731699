"""The run file: one YAML that composes the components' own Configs, with overrides from the command line."""

import difflib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from headrace.checkpoint.config import CheckpointConfig
from headrace.config import Config
from headrace.data.config import DataConfig
from headrace.errors import UserError
from headrace.lanes.config import ThreadsConfig
from headrace.memory.config import MemoryConfig
from headrace.models.config import ModelConfig
from headrace.optim.config import OptimConfig, UpdateConfig
from headrace.training.config import Report, TrainConfig


def _policy(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


class RunFile(Config):
    """Everything a run needs; whatever is left out has a default, and `auto` is filled in by the plan."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig.model_validate({})
    optim: OptimConfig = OptimConfig.model_validate({})
    update: Annotated[UpdateConfig, BeforeValidator(_policy)] = Field(
        UpdateConfig.model_validate({}), description="a policy's name, or a mapping with its settings"
    )
    memory: MemoryConfig = MemoryConfig.model_validate({})
    checkpoint: CheckpointConfig = CheckpointConfig.model_validate({})
    threads: ThreadsConfig = ThreadsConfig.model_validate({})
    report: list[Report] = Field(default_factory=list, description="where metrics go besides metrics.jsonl")
    out: str = Field("runs/run", min_length=1, description="the run's directory")
    predicted: dict[str, Any] | None = Field(
        None, description="written by `headrace plan --save`: the predicted ledger"
    )


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read and check a run file.

    Args:
        path: the YAML file; paths in it are relative to the working directory.
        overrides: ``section.key=value`` texts that replace or add values; the value is YAML.

    Raises:
        UserError: no such file, not YAML, an unknown key, a wrong value: with the place and the fix.
    """
    tree = _read_yaml(Path(path))
    for text in overrides:
        _override(tree, text)
    _drop_rivals(tree, overrides)
    return validate(tree, str(path))


def validate(tree: Mapping[str, Any], source: str) -> RunFile:
    """A run file from plain data; ``source`` names its origin in errors.

    Raises:
        UserError: for the first fault, with its key, value and the fix.
    """
    try:
        return RunFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from None


def dump(run: RunFile) -> str:
    """The run file as YAML text, every default written out."""
    return yaml.safe_dump(to_tree(run), sort_keys=False, allow_unicode=True, width=100)


def to_tree(run: RunFile) -> dict[str, Any]:
    """The run file as plain data; without a prediction that key is left out."""
    tree = run.model_dump(mode="json")
    if run.predicted is None:
        del tree["predicted"]
    return tree


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML would silently keep the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands twice", problem_mark=mark
                )
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give a YAML file in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it does not parse"
        raise UserError(f"{path}{place} is not valid YAML ({problem}): correct that line") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no sections: write at least model: and data:, see docs/run-file.md")
    return tree


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    sections = key.strip().split(".")
    if not equals or not all(sections):
        raise UserError(f"{text!r} is not an override: write section.key=value, for example optim.lr=1e-5")
    try:
        parsed = yaml.load(value, _StrictLoader)
    except yaml.YAMLError:
        raise UserError(f"the value in {text!r} is not valid YAML: quote it") from None
    node = tree
    for section in sections[:-1]:
        inner = node.setdefault(section, {})
        if not isinstance(inner, dict):
            inner = node[section] = {"policy": inner} if section == "update" else {}
        node = inner
    node[sections[-1]] = parsed


def _drop_rivals(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """An override of ``train.steps`` replaces the file's ``train.epochs``, and the other way round."""
    given = {text.partition("=")[0].strip() for text in overrides} & {"train.steps", "train.epochs"}
    if len(given) == 1 and isinstance(tree.get("train"), dict):
        tree["train"].pop("epochs" if given == {"train.steps"} else "steps", None)


def _explain(error: ValidationError, source: str) -> str:
    faults = error.errors(include_url=False)
    first = faults[0]
    key, model = _locate(first["loc"])
    others = len({_locate(fault["loc"])[0] for fault in faults} - {key})
    more = f" (and {others} more to correct)" if others else ""
    return _sentence(key, model, first, source) + more


def _sentence(key: str, model: type[BaseModel], fault: Mapping[str, Any], source: str) -> str:
    if fault["type"] == "extra_forbidden":
        return f"{key} in {source} is not a key: {_hint(key, model)}"
    if fault["type"] == "missing":
        return f"{key} is missing in {source}: {_description(key, model)}"
    message = fault["msg"].removeprefix("Value error, ")
    if not key:
        return f"{source}: {message}"
    return f"{key}={_shown(fault['input'])} in {source}: {message[:1].lower()}{message[1:]}"


def _locate(loc: Sequence[int | str]) -> tuple[str, type[BaseModel]]:
    """The dotted key of a fault, and the Config that holds (or should hold) its last part.

    pydantic appends the tried members of a union; they are not keys and are left out.
    """
    model: type[BaseModel] = RunFile
    parts: list[str] = []
    for part in loc:
        parts.append(str(part))
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        if part != loc[-1]:
            model = inner
    return ".".join(parts), model


def _hint(key: str, model: type[BaseModel]) -> str:
    prefix, _, name = key.rpartition(".")
    dotted = f"{prefix}." if prefix else ""
    if close := difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.6):
        return f"did you mean {dotted}{close[0]}?"
    homes = [full for full in _all_keys() if full.rpartition(".")[2] == name]
    if homes:
        return f"did you mean {homes[0]}?"
    return f"{prefix or 'a run file'} knows {', '.join(model.model_fields)}"


def _all_keys() -> Iterable[str]:
    for section, field in RunFile.model_fields.items():
        yield section
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{section}.{key}" for key in field.annotation.model_fields)


def _description(key: str, model: type[BaseModel]) -> str:
    field = model.model_fields[key.rpartition(".")[2]]
    if field.description:
        return f"add it ({field.description})"
    return "add the section, see docs/run-file.md"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
