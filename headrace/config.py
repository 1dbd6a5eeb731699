"""What every component's Config shares: strict keys, numbers and sizes as people write them."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}I": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


class Config(BaseModel):
    """Base of all Configs: unknown keys are errors, values are immutable, true and false are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_from_a_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        # To Python and pydantic `true` is 1; as the text that was written it is refused in the usual words.
        if not isinstance(value, bool):
            return value
        types = set(_types(cls.model_fields[info.field_name or ""].annotation))
        return json.dumps(value) if {int, float} & types and not {bool, str} & types else value


def _types(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def parse_size(value: int | float | str) -> int:
    """Bytes from ``48GiB``, ``1.5 GB``, ``4096`` or a number.

    Raises ValueError for anything else or for a size that is not above zero.
    """
    match = None if isinstance(value, bool) or value is None else _SIZE.fullmatch(str(value))
    if match is None:
        written = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
        raise ValueError(f"{written} is not a size; write for example 48GiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size < 2**63:
        raise ValueError(f"a size must be above zero and below 8,388,608 TiB, not {str(value)[:40]}")
    return int(size)


def format_size(nbytes: int) -> str:
    """The shortest text that :func:`parse_size` reads back as the same number of bytes."""
    for power, prefix in reversed(list(enumerate("KMGT", start=1))):
        unit = 2 ** (10 * power)
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{prefix}iB"
    return str(nbytes)


def _float_from_text(value: Any) -> Any:
    # PyYAML reads `1e-5` as a string (YAML 1.1 wants `1.0e-5`); people write the former.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


Size = Annotated[int, BeforeValidator(parse_size), PlainSerializer(format_size, return_type=str)]
"""A number of bytes, written ``48GiB`` in a run file."""

Number = Annotated[float, BeforeValidator(_float_from_text), Field(allow_inf_nan=False)]
"""A finite float, also from the text forms that YAML leaves as strings (``1e-5``)."""
