"""What is wrong with values, in people's words: pydantic speaks of its own types."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number that is not as large",
    "int_type": "a whole number",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "multiple_of": "a multiple of {multiple_of:g}",
    "string_too_short": "a text that is not empty",
    "string_type": "a text in quotes",
    "too_short": "a list that is not empty",
}
"""pydantic's type of a fault -> what the value must be."""

_SECTIONS = ("model_type", "model_attributes_type")


def wish(faults: Sequence[Mapping[str, Any]], description: str | None, keys: Iterable[str] = ()) -> str:
    """What one key must hold, from all faults of it: of a union there is one for each member.

    A component's own words stand as they are. Of a section, ``keys`` are those that it has.
    """
    own = [
        str(fault["msg"]).removeprefix("Value error, ") for fault in faults if fault["type"] == "value_error"
    ]
    if any(fault["type"] in _SECTIONS for fault in faults):
        return f"it is a section: write its keys below it ({', '.join(keys)})"
    wanted = list(dict.fromkeys(_wanted(fault) for fault in faults if fault["type"] != "value_error"))
    if own:
        return ", or ".join([*own, *wanted])
    return f"it must be {', or '.join(wanted)}" + (f" ({description})" if description else "")


def shown(value: Any) -> str:
    """A value as one writes it in a run file, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."


def unreadable(tree: Any) -> str | None:
    """What keeps plain data from being a run file, whatever its keys mean; None if nothing does."""
    return next(_unreadable(tree, ()), None)


def _wanted(fault: Mapping[str, Any]) -> str:
    if fault["type"] not in _WANTED:
        return str(fault["msg"]).removeprefix("Input should be ")
    return _WANTED[fault["type"]].format(**fault.get("ctx", {})).replace("'", "")


def _unreadable(value: Any, around: tuple[int, ...]) -> Iterator[str]:
    if isinstance(value, str):
        if "\0" in value or not _encodable(value):
            yield f"the text {shown(ascii(value))} holds characters that no path or name can have"
    elif isinstance(value, Mapping | list):
        if id(value) in around:
            yield "an alias (*) stands inside its own anchor (&)"
            return
        if isinstance(value, Mapping):
            yield from (f"the key {shown(key)} is not a text" for key in value if not isinstance(key, str))
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _unreadable(inner, (*around, id(value)))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
