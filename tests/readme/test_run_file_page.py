"""docs/run-file.md names every key of a run file, with its default and its own description.

Prints the rows that belong there: python tests/readme/test_run_file_page.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.run.file import RunFile

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"
WRITTEN_BY_HEADRACE = {"predicted"}


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{prefix}{name}.")
        elif name not in WRITTEN_BY_HEADRACE:
            yield prefix + name, field


def row(key: str, field: FieldInfo) -> str:
    options = ", ".join(f"`{option}`" for option in choices(field.annotation))
    return f"| `{key}` | {default(field)} | {field.description}{f' ({options})' if options else ''} |"


def choices(annotation: Any) -> list[str]:
    """The texts of all Literals in a type; a single one is no choice."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation)) if len(get_args(annotation)) > 1 else []
    return [choice for part in get_args(annotation) for choice in choices(part)]


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def test_every_key_is_explained_and_no_other():
    written = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert written == [row(key, field) for key, field in keys(RunFile)]


if __name__ == "__main__":
    print("\n".join(row(key, field) for key, field in keys(RunFile)))
