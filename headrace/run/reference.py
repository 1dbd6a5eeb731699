"""The table of all keys in docs/run-file.md, from the components' own Configs.

``python -m headrace.run.reference docs/run-file.md`` writes it anew.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.memory.durable import replace_text
from headrace.run.file import RunFile, section_of

BEGIN = "<!-- keys: written by python -m headrace.run.reference docs/run-file.md -->"
END = "<!-- end of keys -->"

_WRITTEN_BY_HEADRACE = {"predicted"}


def keys(model: type[BaseModel] = RunFile, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that people write, dotted, with its field; a section's keys in its place."""
    for name, field in model.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")
        elif name not in _WRITTEN_BY_HEADRACE:
            yield prefix + name, field


def table() -> str:
    """The table of all keys: key, default, description with the choices there are."""
    rows = [_row(key, field) for key, field in keys()]
    return "\n".join(["| key | default | what it is |", "|---|---|---|", *rows])


def with_table(page: str) -> str:
    """A page whose table, between :data:`BEGIN` and :data:`END`, is the present one."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"the page has no place for the table: {BEGIN} and {END}"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _row(key: str, field: FieldInfo) -> str:
    options = ", ".join(f"`{option}`" for option in _choices(field.annotation))
    return f"| `{key}` | {_default(field)} | {field.description}{f' ({options})' if options else ''} |"


def _choices(annotation: Any) -> list[str]:
    """The texts of all Literals in a type; a single one is no choice."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation)) if len(get_args(annotation)) > 1 else []
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def main(path: Path) -> None:
    """Write the page's table anew."""
    replace_text(path, with_table(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
