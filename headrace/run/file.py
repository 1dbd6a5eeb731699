"""The run file: one YAML that composes the components' own Configs, with overrides from the command line."""

import codecs
import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from headrace.checkpoint.config import CheckpointConfig
from headrace.config import Config
from headrace.data.config import DataConfig
from headrace.errors import UserError
from headrace.lanes.config import ThreadsConfig
from headrace.memory.config import MemoryConfig
from headrace.models.config import ModelConfig
from headrace.optim.config import OptimConfig, UpdateConfig
from headrace.run.faults import shown, unreadable, wish
from headrace.run.foreign import find_known
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

    @model_validator(mode="after")
    def _compiled_layers_stay(self) -> "RunFile":
        if self.train.compile and self.memory.weights != "device":
            raise ValueError(
                f"train.compile=true and memory.weights={self.memory.weights} do not go together, for "
                "compiled layers expect their weights in one place: set train.compile=false"
            )
        return self


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
    given = [text.partition("=")[0].strip() for text in overrides]
    if twice := [key for key in given if given.count(key) > 1]:
        raise UserError(f"{twice[0]} is given twice on the command line: keep one of them")
    _drop_rivals(tree, overrides)
    return validate(tree, str(path), given)


def validate(tree: Mapping[str, Any], source: str, overridden: Sequence[str] = ()) -> RunFile:
    """A run file from plain data; ``source`` names its origin in errors, except of the overridden keys.

    Raises:
        UserError: for the first fault, with its key, value and the fix.
    """
    if problem := unreadable(tree):
        raise UserError(f"{source} cannot be used: {problem}")
    try:
        return RunFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error, source, overridden)) from None


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
    """Refuses a key that stands twice, of which YAML would silently keep the second; dates stay texts."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                mark = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands twice", problem_mark=mark
                )
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_PROBLEMS = {
    "found character '\\t'": "a tab stands where YAML takes spaces",
    "mapping values are not": "a colon in a value without quotes, or a key indented unlike its neighbours",
    "expected <block end>, but found '<block": "it is indented unlike its neighbours",
    "expected <block end>, but found '?'": "it is indented unlike its neighbours",
}
"""How the parser's words begin, and what they mean."""

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _parse(text: str) -> Any:
    """Plain data from YAML; YAMLError also for what Python cannot hold."""
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deep") from None
    except ValueError:
        raise yaml.MarkedYAMLError(problem="a number has too many digits") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}: give the path of a YAML file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a YAML file") from None
    except UnicodeDecodeError as error:
        found = "it is UTF-16" if error.object[:2] in _UTF_16 else f"byte {error.start} is no UTF-8"
        raise UserError(f"{path} cannot be read as text ({found}): give a YAML file in UTF-8") from None
    except ValueError as error:  # a path that cannot be one
        raise UserError(f"{str(path)!r} cannot be read ({error}): give the path of a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{place} is not valid YAML ({_problem(error)}): correct that line") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no sections: write at least model: and data:, see docs/run-file.md")
    return tree


def _problem(error: yaml.YAMLError) -> str:
    """What is wrong with the text; of the usual mistakes in people's words."""
    problem = getattr(error, "problem", None) or "it does not parse"
    return next((words for start, words in _PROBLEMS.items() if problem.startswith(start)), problem)


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    sections = key.strip().split(".")
    if not equals or not all(sections):
        raise UserError(f"{text!r} is not an override: write section.key=value, for example optim.lr=1e-5")
    try:
        parsed = _parse(value)
    except yaml.YAMLError as error:
        raise UserError(
            f"the value in {shown(text)} is not valid YAML ({_problem(error)}): quote it"
        ) from None
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


def _explain(error: ValidationError, source: str, overridden: Sequence[str]) -> str:
    """The first fault as a sentence; a key of another tool comes first, for what it means is known."""
    faults = error.errors(include_url=False)
    first = next((fault for fault in faults if _foreign(fault)), faults[0])
    key, model = _locate(first["loc"])
    others = len({_locate(fault["loc"])[0] for fault in faults} - {key})
    more = f" (and {others} more to correct)" if others else ""
    if first["type"] == "missing":
        return f"{key} is missing in {source}: {_description(key, model)}{more}"
    place = "on the command line" if any(_touch(key, given) for given in overridden) else f"in {source}"
    same = [fault for fault in faults if _locate(fault["loc"])[0] == key]
    return _sentence(key, model, [first] if _foreign(first) else same, place) + more


def _sentence(key: str, model: type[BaseModel], faults: Sequence[Mapping[str, Any]], place: str) -> str:
    """One key's faults as a sentence."""
    first = faults[0]
    if found := _foreign(first):
        return f"{found[0]} {place} is not a key; {found[1]}"
    if first["type"] == "extra_forbidden":
        return f"{key} {place} is not a key: {_hint(key, model)}"
    field = model.model_fields.get(key.rpartition(".")[2])
    section = section_of(field) if field else model if key.rpartition(".")[2].isdigit() else None
    message = wish(faults, field.description if field else None, section.model_fields if section else ())
    if (
        isinstance(first["input"], Mapping) and first["type"] == "value_error"
    ):  # of a section: it names its keys
        return f"{place.removeprefix('in ')}: {message}"
    return f"{key}={shown(first['input'])} {place}: {message}"


def _touch(key: str, given: str) -> bool:
    """Whether one of two dotted keys is the other, or a section around it."""
    return f"{key}.".startswith(f"{given}.") or f"{given}.".startswith(f"{key}.")


def _foreign(fault: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key and the answer, where a fault is a key of another tool."""
    if fault["type"] != "extra_forbidden":
        return None
    return find_known(_locate(fault["loc"])[0], fault["input"], dict(all_keys()))


def _locate(loc: Sequence[int | str]) -> tuple[str, type[BaseModel]]:
    """The dotted key of a fault, and the Config that holds (or should hold) its last part.

    pydantic appends the tried members of a union; they are not keys and are left out.
    """
    model: type[BaseModel] = RunFile
    parts: list[str] = []
    for part in loc:
        parts.append(str(part))
        if isinstance(part, int):  # the number of an item in a list of sections
            continue
        field = model.model_fields.get(part)
        inner = section_of(field) or item_of(field) if field else None
        if inner is None:
            break
        if part != loc[-1]:
            model = inner
    return ".".join(parts), model


def _hint(key: str, model: type[BaseModel]) -> str:
    prefix, _, name = key.rpartition(".")
    dotted = f"{prefix}." if prefix else ""
    if close := difflib.get_close_matches(name, model.model_fields, n=1, cutoff=0.6):
        return f"did you mean {dotted}{close[0]}?"
    homes = [full for full, _ in all_keys() if full.rpartition(".")[2] == name]
    if homes:
        return f"did you mean {homes[0]}?"
    return f"{prefix or 'a run file'} knows {', '.join(model.model_fields)}"


def all_keys(model: type[BaseModel] = RunFile, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key, sections too, with its description."""
    for name, field in model.model_fields.items():
        yield prefix + name, field.description or ""
        if inner := section_of(field):
            yield from all_keys(inner, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The Config that a field holds, also where it may be left out (``X | None``); else None."""
    if get_origin(field.annotation) is list:
        return None
    members = (field.annotation, *get_args(field.annotation))
    return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    """The Config of which a field holds a list; else None."""
    item = next(iter(get_args(field.annotation)), None) if get_origin(field.annotation) is list else None
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def _description(key: str, model: type[BaseModel]) -> str:
    field = model.model_fields[key.rpartition(".")[2]]
    if field.description:
        return f"add it ({field.description})"
    return "add the section, see docs/run-file.md"
