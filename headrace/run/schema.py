"""The JSON schema of the run file: editors check and complete by it while one types."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from headrace.config import parse_size
from headrace.run.file import RunFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SIZE = r"^\s*\d+(\.\d+)?\s*[KMGTkmgt]?[Ii]?[Bb]?\s*$"
_FLOAT = r"^\s*[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\s*$"


def json_schema() -> dict[str, Any]:
    """The schema: every key with its type, default and description; unknown keys are errors.

    It knows shapes, not meanings: that ``train.steps`` and ``train.epochs`` exclude each other is left to
    :func:`headrace.run.file.validate`.
    """
    schema = RunFile.model_json_schema(schema_generator=_Generator)
    update = schema["properties"]["update"]
    policies = schema["$defs"][update.pop("$ref").rpartition("/")[2]]["properties"]["policy"]
    names = policies.get("enum") or [policies["const"]]
    update["anyOf"] = [{"enum": names}, {"$ref": "#/$defs/UpdateConfig"}]
    return {"$schema": DIALECT, **schema, "title": "Headrace run file"}


class _Generator(GenerateJsonSchema):
    """Numbers and sizes as people write them: see :data:`headrace.config.Number` and ``Size``."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        """A number, or the texts (``1e-5``) that YAML 1.1 leaves as strings."""
        return {"anyOf": [super().float_schema(schema), {"type": "string", "pattern": _FLOAT}]}

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """A size may be a number of bytes or a text with a unit."""
        if schema["function"]["function"] is parse_size:
            return {
                "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _SIZE}]
            }
        return super().function_before_schema(schema)
