import re

import pytest
import yaml

from headrace.errors import UserError
from headrace.run.file import RunFile, dump, read_run_file, section_of, validate

SMALL = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_numbers_as_people_write_them(write):
    run = read_run_file(
        write("model: {path: m}\ndata: {train: d}\noptim: {lr: 1e-5}\nmemory: {host: 1.5GiB}\n")
    )
    assert run.optim.lr == 1e-5
    assert run.memory.host == 3 * 2**29


def test_the_saved_text_reads_back_equal(write):
    run = validate(SMALL, "here")
    assert read_run_file(write(dump(run))) == run


def test_update_by_name_or_mapping():
    assert validate({**SMALL, "update": "sync"}, "x") == validate(
        {**SMALL, "update": {"policy": "sync"}}, "x"
    )


def test_overrides(write):
    path = write("model: {path: m}\ndata: {train: d}\nupdate: sync\n")
    run = read_run_file(
        path, ["optim.lr=3e-4", "data.packing=false", "update.bucket=131072", "report=[tensorboard]"]
    )
    assert (run.optim.lr, run.data.packing, run.update.bucket, run.report) == (
        3e-4,
        False,
        131072,
        ["tensorboard"],
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {path: m}\ndata: {train: d, contxt: 5}",
            r"data\.contxt .* not a key: did you mean data\.context\?",
        ),
        ("model: {path: m}\ndata: {train: d}\nlr: 1", r"lr .* did you mean optim\.lr\?"),
        ("model: {path: m}\ndata: {train: d}\ntrain: {lr: 1}", r"train\.lr .* did you mean optim\.lr\?"),
        ("model: {path: m}\ndata: {train: d}\nmodle: {}", r"modle .* did you mean model\?"),
        ("model: {path: m}", r"data is missing"),
        ("model: {}\ndata: {train: d}", r"model\.path is missing in .*run\.yaml: add it"),
        ("model: {path: m}\ndata: {train: d}\noptim: {lr: -1}", r"optim\.lr=-1 in .*: it must be above 0"),
        ("model: {path: m}\ndata: {train: d}\noptim: {lr: high}", r"optim\.lr=high"),
        ("model: {path: m}\ndata: {train: d}\nmemory: {host: lots}", r"memory\.host=lots in .* not a size"),
        ("model: {path: m}\ndata: {train: d}\nmemory: {states: disk}", r"memory\.states=disk"),
        ("model: {path: m}\ndata: {train: d}\nupdate: never", r"update\.policy=never"),
        (
            "model: {path: m}\ndata: {train: d}\ntrain: {steps: 3, epochs: 1}",
            r"train\.steps=3 and train\.epochs=1",
        ),
        (
            "model: {path: m}\ndata: {train: d}\ntrain: {batch: 5, micro_batch: 2}",
            r"train\.batch=5 .* train\.micro_batch",
        ),
        ("model: {path: m}\ndata: {train: d}\noptim: {lr: 1, lr: 2}", r"line 3 .* 'lr' stands twice"),
        ("model: [", r"line 1 is not valid YAML"),
        ("model:\n\tpath: m", r"line 2 is not valid YAML \(a tab stands where YAML takes spaces\): correct"),
        ("model:\n  path:\tm\n", r"line 2 is not valid YAML \(a tab stands"),
        ("model:\n  path: m\n dtype: bf16", r"line 3 .* \(it is indented unlike its neighbours\)"),
        ("data:\n  - a\n  b: c", r"line 3 .* \(it is indented unlike its neighbours\)"),
        ("model:\n  path: C: models", r"line 2 .* \(a colon in a value without quotes, or a key indented"),
        ("model:\n  path: m\n    dtype: bf16", r"line 3 .* or a key indented unlike its neighbours\)"),
        ("- a\n- b", r"holds no sections"),
        ("", r"holds no sections"),
        (
            "model: m\ndata: {train: d}",
            r"model=m in .*: it is a section: write its keys below it \(path, dtype, lora\)",
        ),
    ],
)
def test_mistakes_are_one_sentence_with_place_and_fix(write, text, message):
    with pytest.raises(UserError, match=message) as caught:
        read_run_file(write(text))
    assert "\n" not in str(caught.value)


def settings(model=RunFile, prefix=""):
    """Every key that holds a value, with its field."""
    for name, field in model.model_fields.items():
        if (section := section_of(field)) is None:
            yield f"{prefix}{name}", field
        else:
            yield from settings(section, f"{prefix}{name}.")


@pytest.mark.parametrize("word", ["true", "false", "yes", "off"])
@pytest.mark.parametrize(("key", "field"), [*settings()], ids=[key for key, _ in settings()])
def test_true_and_false_are_no_numbers_texts_or_lists(write, key, field, word):
    path = write(yaml.safe_dump(SMALL))
    if field.annotation is bool:
        read_run_file(path, [f"{key}={word}"])
        return
    shown = "true" if word in ("true", "yes") else "false"
    with pytest.raises(UserError, match=rf"^{re.escape(key)}={shown} on the command line: \S"):
        read_run_file(path, [f"{key}={word}"])


@pytest.mark.parametrize(
    ("override", "length"), [("train.steps=4", (4, None)), ("train.epochs=2", (None, 2.0))]
)
def test_an_override_replaces_its_rival(write, override, length):
    for own in ("steps: 9", "epochs: 3"):
        run = read_run_file(write(f"model: {{path: m}}\ndata: {{train: d}}\ntrain: {{{own}}}\n"), [override])
        assert (run.train.steps, run.train.epochs) == length


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "section.key=value"),
        ("optim.=1", "section.key=value"),
        ("optim.lr=[", "quote it"),
        ("optin.lr=1", "optim"),
    ],
)
def test_wrong_overrides(write, override, message):
    path = write(yaml.safe_dump(SMALL))
    with pytest.raises(UserError, match=message):
        read_run_file(path, [override])


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="there is no run file"):
        read_run_file(tmp_path / "none.yaml")
