"""The JSON schema takes what `validate` takes, and refuses what an editor can see."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.errors import UserError
from headrace.run.file import dump, validate
from headrace.run.reference import keys
from headrace.run.schema import DIALECT, json_schema

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SMALL = {"model": {"path": "m"}, "data": {"train": "d"}}


@pytest.fixture(scope="module")
def checker():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def tree(**values):
    """A small run with one value set: ``section__key=value``."""
    result = {section: dict(held) for section, held in SMALL.items()}
    for name, value in values.items():
        section, _, key = name.partition("__")
        if key:
            result.setdefault(section, {})[key] = value
        else:
            result[section] = value
    return result


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_as_written_and_as_planned(checker, path):
    asked = yaml.safe_load(path.read_text(encoding="utf-8"))
    checker.validate(asked)
    checker.validate(yaml.safe_load(dump(validate(asked, path.name))))


TAKEN = [
    tree(optim__lr="1e-5"),
    tree(optim__lr=1e-5),
    tree(memory__host="48GiB"),
    tree(memory__host="1.5 GB"),
    tree(memory__host=2**30),
    tree(memory__host="auto"),
    tree(update="sync"),
    tree(update={"policy": "sync", "bucket": 1 << 20}),
    tree(data__eval=0.1),
    tree(data__eval=["a.jsonl"]),
    tree(data__eval=None),
    tree(train__steps=None, train__epochs=2),
    tree(checkpoint__resume=7),
    tree(report=["tensorboard", "wandb"]),
    tree(predicted={"steps": 1}),
]
REFUSED = [
    {"model": {"path": "m"}},
    tree(learning_rate=1e-5),
    tree(optim__learning_rate=1e-5),
    tree(optim__lr=-1),
    tree(optim__lr="fast"),
    tree(memory__host="lots"),
    tree(memory__host=0),
    tree(update="never"),
    tree(train__batch=0),
    tree(train__batch=1.5),
    tree(data__packing="perhaps"),
    tree(report=["paper"]),
    tree(model="m"),
]


@pytest.mark.parametrize("run", TAKEN, ids=str)
def test_what_is_taken_is_valid(checker, run):
    validate(run, "here")
    checker.validate(run)


@pytest.mark.parametrize("run", REFUSED, ids=str)
def test_what_is_refused_is_invalid(checker, run):
    with pytest.raises(UserError):
        validate(run, "here")
    assert not checker.is_valid(run)


def test_every_key_has_a_description_for_the_editor_to_show():
    schema = json_schema()

    def described(node, dotted):
        for part in dotted.split("."):
            node = next(place for place in places(node) if part in place.get("properties", {}))
            node = node["properties"][part]
        return node["description"]

    def places(node):
        """The node, what it refers to, and the alternatives that it allows."""
        yield node
        if "$ref" in node:
            yield from places(schema["$defs"][node["$ref"].rpartition("/")[2]])
        for inner in node.get("anyOf", []):
            yield from places(inner)

    for key, field in keys():
        assert described(schema, key) == field.description


def test_the_command_prints_it_without_loading_torch():
    command = [sys.executable, "-X", "importtime", "-m", "headrace", "schema"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(json.dumps(json_schema()))
    assert json.loads(done.stdout)["$schema"] == DIALECT
    assert " torch\n" not in done.stderr
