"""Wrong input of every kind: code 2, one sentence with the value and the fix, no traceback, nothing left."""

import json
import re
import shutil
import signal
import sys

import evidence
import pytest

from headrace.cli.demo import MARK, _empty
from headrace.cli.main import main
from headrace.errors import UserError
from headrace.run.plan import plan
from headrace.run.train import train

DIGITS = "9" * 5000


@pytest.fixture
def refuse(capsys, monkeypatch):
    """Runs a command in this process; it must end with 2 and a sentence that has the pattern."""
    before = signal.getsignal(signal.SIGINT)

    def command(pattern, *arguments, printed=False):
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        output, errors = capsys.readouterr()
        assert end.value.code == 2, errors
        assert re.fullmatch(f"headrace: .*{pattern}.*\n", errors), errors
        assert printed or output == ""

    yield command
    signal.signal(signal.SIGINT, before)


VALUES = [
    (["train.epochs=.inf", "train.steps=null"], r"train\.epochs=\.inf on the .*: it must be a finite number"),
    (["train.epochs=1e308"], r"train\.epochs=1e308 .*at most 1e\+06"),
    (["train.epochs=0"], r"train\.epochs=0 .*above 0"),
    ([f"train.steps={10**30}"], r"train\.steps=1000.* at most 1e\+09"),
    ([f"train.steps={DIGITS}"], r"'?train\.steps=999.*a number has too many digits\): quote it"),
    ([f"train.seed={10**30}"], r"train\.seed=1000.*: it must be below 9\.22337e\+18"),
    (["train.batch=1000000000", "train.micro_batch=1"], r"train\.batch=1000000000 .*at most 1\.04858e\+06"),
    (["train.micro_batch=Auto"], r"train\.micro_batch=Auto .*: it must be a whole number, or auto"),
    (["train.batch=7"], r"train\.batch=7 is not a multiple of train\.micro_batch=2; .*micro_batch=1$"),
    (["train=5"], r"train=5 on the command line: it is a section"),
    (["optim=null"], r"optim=null on the command line: it is a section"),
    (["optim.lr=1e300"], r"optim\.lr=1e\+300 .*at most 1e\+38"),
    (["optim.lr=.nan"], r"optim\.lr=\.nan on the command line: it must be"),
    (["optim.lr=null"], r"optim\.lr=null .*: it must be a number"),
    (["optim.lr=2024-13-45"], r"optim\.lr=2024-13-45 .*: it must be a number"),
    (["optim.lr=1e-3", "optim.lr=2e-3"], r"optim\.lr is given twice on the command line: keep one"),
    (["optim.weight_decay=1e300"], r"optim\.weight_decay=1e\+300 .*at most 1e\+38"),
    (["checkpoint.resume=-1"], r"checkpoint\.resume=-1 .*: it must be auto or never, or at least 0 \(auto: "),
    (["memory.host=null"], r"memory\.host=null .*null is not a size; write for example 48GiB, or auto"),
    ([f"memory.host={'9' * 400}"], r"memory\.host=999.* a size must be above zero and below"),
    (["memory.host=48"], r"RAM needs .* more than the 48 bytes of memory\.host: set memory\.host=\d+[MG]iB"),
    (["threads.compute=100000"], r"threads\.compute=100000 .*: it must be at most 512, or auto"),
    (["threads.update=100000"], r"threads\.update=100000 .*: it must be at most 512, or auto"),
    (["report=tensorboard"], r"report=tensorboard .*: it must be a list"),
    (['out="a\\0b"'], r"holds characters that no path or name can have"),
    (["out=/"], r"out=/ is the root of a file system: choose a directory"),
    (["out=/dev/null"], r"out=/dev/null cannot be written to .*: choose another out"),
    (["out=/proc/here"], r"out=/proc/here cannot be written to .*: choose another out"),
    (["out=" + "long" * 100], r"out=.* cannot be .* \(File name too long\)"),
    (["{=1"], r"\{ on the command line is not a key"),
]


@pytest.mark.parametrize(("overrides", "pattern"), VALUES, ids=[" ".join(o)[:40] for o, _ in VALUES])
def test_a_wrong_value_is_named_where_it_was_given(refuse, write_run, overrides, pattern):
    path = write_run()
    refuse(pattern, "train", path, *overrides)
    assert not evidence.home(path).exists()


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("[" * 5000 + "]" * 5000, r"it is nested too deep"),
        (f"model: {{path: m}}\ntrain: {{steps: {DIGITS}}}", r"a number has too many digits"),
        (
            "model: &own {path: m, inner: *own}\ndata: {train: d}",
            r"\(\*\) stands inside its own anchor \(&\)",
        ),
        ("model: {path: m}\ndata: {train: d}\n7: x", r"the key 7 is not a text"),
        ('model: {path: "a\\0b"}\ndata: {train: d}', r"holds characters that no path or name can have"),
        ('model: {path: "\\ud800"}\ndata: {train: d}', r"holds characters that no path or name can have"),
        (
            "model: {path: m}\ndata: {train: d}\nout: 2024",
            r"out=2024 in .*run\.yaml: it must be a text in quotes",
        ),
        (
            "model: {path: m}\ndata: {train: d}\noptim: {lr: 2024-13-45}",
            r"optim\.lr=2024-13-45 in .*a number",
        ),
        ("model: {path: m}\ndata: {train: d, packing: perhaps}", r"data\.packing=perhaps in .*true or false"),
        ("\x07", r"not valid YAML"),
    ],
)
def test_a_run_file_that_is_none(refuse, tmp_path, text, pattern):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    refuse(pattern, "plan", path)


def test_a_run_file_that_cannot_be_read(refuse, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    refuse(r"binary cannot be read as text", "plan", tmp_path / "binary")
    refuse(r"cannot be read \(Is a directory\)", "train", tmp_path)
    refuse(r"nowhere/run\.yaml: give the path", "train", tmp_path / "nowhere" / "run.yaml")


def test_a_date_is_a_name_like_any_other(write_run):
    assert evidence.home(write_run()).exists() is False
    from headrace.run.file import read_run_file

    assert read_run_file(write_run(), ["out=2024-13-45"]).out == "2024-13-45"
    assert read_run_file(write_run(), ["out=2024-12-24"]).out == "2024-12-24"


# -- directories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "just text", "- a", "{}", "[" * 5000, "a: {", "\x00"])
def test_a_plan_that_is_none(refuse, write_run, tmp_path, content):
    path, home = write_run(), tmp_path / "run"
    home.mkdir()
    (home / "plan.yaml").write_text(content, encoding="utf-8")
    (home / "checkpoint-2").mkdir()
    for command in (("show", home), ("export", home, tmp_path / "out"), ("train", path)):
        refuse(r"plan\.yaml", *command)


def test_show_and_export_of_what_is_no_run(refuse, write_run, tmp_path):
    path = write_run()
    for command in (("show", path), ("export", path, tmp_path / "out")):
        refuse(r"run\.yaml is a file, not the directory of a run: give the `out`", *command)
    refuse(r"holds no run: plan\.yaml is missing", "show", tmp_path)
    home = tmp_path / "saved"
    home.mkdir()
    shutil.copy(path, home / "plan.yaml")
    refuse(r"plan\.yaml holds no prediction: it is not the plan of a run", "show", home)


def test_places_that_cannot_be_written_to(refuse, write_run, tmp_path):
    path = write_run()
    for place in (tmp_path, "/proc/plan.yaml", path / "below"):
        refuse(
            rf"--save {place} cannot be written to .*: give another path",
            "plan",
            path,
            "--save",
            place,
            printed=True,
        )
    train(path)
    home = evidence.home(path)
    refuse(r"/proc/model cannot be written to .*: give another path", "export", home, "/proc/model")
    refuse(r"--dtype fp16 cannot be written: choose bf16 or fp32", "export", home, "out", "--dtype", "fp16")


def test_a_model_that_is_not_finite_is_not_asked(refuse, write_run):
    import torch
    from safetensors.torch import load_file, save_file

    path = write_run()
    train(path)
    weights = evidence.home(path) / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    refuse(r"model\.norm\.weight of .*model is not finite", "sample", weights.parent, "Hello")


# -- other people's files ----------------------------------------------------------------------------------


def test_a_model_of_another_origin_is_not_replaced(refuse, write_run):
    path = write_run()
    model = evidence.home(path) / "model"
    model.mkdir(parents=True)
    (model / "mine.txt").write_text("mine")
    refuse(r"model/mine\.txt was not written by this run, .*: move it", "train", path)
    assert [file.name for file in model.iterdir()] == ["mine.txt"]
    shutil.rmtree(model)
    model.write_text("a file")
    refuse(r"model is in the way of the trained model: move it", "train", path)


def test_a_run_replaces_its_own_model_but_nothing_beside_it(refuse, write_run):
    path = write_run()
    train(path)
    first = evidence.weights(path)
    train(path, ["train.steps=10"])
    assert evidence.weights(path) != first
    model = evidence.home(path) / "model"
    (model / "README.md").write_text("mine")
    train(path, ["train.steps=10"])  # finished: nothing is written
    refuse(r"model/README\.md was not written by this run", "train", path, "train.steps=12")
    (model / "README.md").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "note": "mine"}))
    refuse(r"model/config\.json was not written by this run", "train", path, "checkpoint.resume=never")


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_run_does_not_replace_the_model_that_it_starts_from(refuse, write_run, resume):
    path = write_run()
    train(path)
    model, before = evidence.home(path) / "model", evidence.weights(path)
    changes = (f"checkpoint.resume={resume}", "checkpoint.accept_changes=true", "train.steps=10")
    refuse(r"model\.path=.*model lies in out=", "train", path, f"model.path={model}", *changes)
    assert evidence.weights(path) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.json", "trace.json", "data"])
def test_a_directory_with_files_of_others_is_refused(refuse, write_run, name):
    path = write_run()
    home = evidence.home(path)
    home.mkdir()
    (home / name).write_text("mine")
    (home / "run.yaml").write_text("may lie here")
    refuse(rf"{name} was not written by a run and out=.* would overwrite it", "train", path)
    assert sorted(file.name for file in home.iterdir()) == sorted([name, "run.yaml"])
    assert (home / name).read_text() == "mine"


@pytest.mark.parametrize("made", [False, True])
def test_a_demo_deletes_only_what_a_demo_made(refuse, tmp_path, made):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("mine")
    if made:
        (home / ".headrace-demo").touch()
        (home / "word.yaml").touch()
    refuse(
        r"--out .*home holds thesis\.tex, which no demo made .*: choose a new",
        "demo",
        "--out",
        home,
        "--model",
        "x",
    )
    assert (home / "thesis.tex").read_text() == "mine"
    refuse(
        r"--out .*thesis\.tex cannot be used \(Not a directory\)",
        "demo",
        "--out",
        home / "thesis.tex",
        "--model",
        "x",
    )


def test_a_demo_empties_an_earlier_one(tmp_path):
    home = _empty(tmp_path / "new" / "home")
    (home / "word" / "model").mkdir(parents=True)
    (home / "word.yaml").touch()
    assert [path.name for path in _empty(home).iterdir()] == [MARK]


def test_a_warm_up_longer_than_the_run_is_refused_by_the_plan(write_run):
    path = write_run()
    with pytest.raises(UserError, match=r"optim\.warmup=100 steps leaves none of the run's 8"):
        plan(path, ["optim.warmup=100"])
    with pytest.raises(UserError, match=r"optim\.warmup=100"):
        train(path, ["optim.warmup=100"])
    assert not evidence.home(path).exists()


def test_a_tilde_in_out_is_the_home(write_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    train(write_run(out="~/run"), ["train.steps=2"])
    assert (tmp_path / "home" / "run" / "model" / "config.json").is_file()
    assert not (tmp_path / "~").exists()
