"""The commands as a shell sees them: exit codes, what is printed where, what is written."""

import re
import resource
import subprocess
import sys

import cli_process
import evidence
import pytest
import torch
from safetensors.torch import load_file

from headrace.run.train import train


def headrace(*arguments, **options):
    """Exit code, output and errors of `python -m headrace`, with nothing imported beforehand."""
    command = [sys.executable, "-m", "headrace", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=cli_process.TIMEOUT, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def quick(processes, tmp_path):
    """The same for commands that need torch, in a process that has it already."""

    def command(*arguments):
        return cli_process.execute(processes, tmp_path / "printed", arguments)

    return command


def assert_one_sentence(result, code, pattern):
    found, printed, errors = result
    assert found == code, result
    assert re.search(pattern, errors), errors
    assert printed == "" and errors.startswith("headrace: ") and errors.count("\n") == 1


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        (["train.max_skiped=3"], r"train\.max_skiped on the command line .* mean train\.max_skipped\?"),
        (["data.lr=1e-5"], r"did you mean optim\.lr\?"),
        (["train.steps=3", "train.epochs=1"], r"train\.steps=3 and train\.epochs=1 contradict each other"),
        (["memory.host=64 gigs"], r"memory\.host=64 gigs on the command line: .*write for example 48GiB"),
        (["optim.lr"], r"write section\.key=value"),
        (["model.path=nowhere"], r"model\.path=nowhere does not exist"),
        (["data.context=4096"], r"data\.context=4096 is more than the 128 positions"),
    ],
)
def test_mistakes_in_the_run_file_end_with_2(write_run, overrides, pattern):
    assert_one_sentence(headrace("plan", write_run(), *overrides), 2, pattern)


def test_mistakes_that_need_the_data_or_the_disk_end_with_2(write_run, quick, tmp_path):
    path = write_run()
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for override, pattern in (
        ("data.train=nowhere.jsonl", r"data\.train.*nowhere\.jsonl"),
        (f"out={in_the_way}/run", r"out=.*file/run cannot be written to \(Not a directory\): choose another"),
        (f"out={in_the_way}", r"out=.*file cannot be written to \(File exists\): choose another out"),
        ("checkpoint.resume=5", r"checkpoint\.resume=5: there is no such step"),
    ):
        code, _, errors = quick("train", path, override)
        assert code == 2 and re.fullmatch(f"headrace: .*{pattern}.*\n", errors), errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "nowhere.yaml"),
        ("show", "nowhere"),
        ("export", "nowhere", "out"),
        ("sample", "nowhere", "x"),
    ],
)
def test_what_is_not_there_is_named(arguments, quick):
    assert_one_sentence(quick(*arguments), 2, "nowhere")


def test_a_plan_that_does_not_fit_ends_with_2_and_a_knob(write_run, quick):
    path = write_run(memory__host="64MiB")
    sentence = (
        r"DOES NOT FIT: RAM needs \d+ MiB, .* the 64 MiB of memory\.host: set (memory\.host=\d+MiB|.*GiB)"
    )
    code, printed, errors = headrace("plan", path)
    assert (code, errors) == (2, "")
    assert headrace("plan", path, re.search(sentence, printed)[1])[0] == 0
    assert not evidence.home(path).exists()
    assert_one_sentence(quick("train", path), 2, sentence)


# -- failures ----------------------------------------------------------------------------------------------


def test_a_run_that_explodes_ends_with_1(write_run, quick):
    path = write_run(optim__lr=1e38, train__max_skipped=2, data__eval=None)
    code, printed, errors = quick("train", path)
    named = r"model\.[\w.]+"
    sentence = rf"headrace: 2 steps in a row had a gradient .*, the last in {named}: lower optim\.lr, .*\n"
    assert code == 1 and re.fullmatch(sentence, errors), errors
    for step, count in ((2, 1), (3, 2)):
        line = rf"^! step {step} skipped: gradient not finite in {named} \({count} so far\)$"
        assert re.search(line, printed, re.MULTILINE), printed
    assert "step 3/8" in printed and "step 4/8" not in printed


def test_a_full_disk_ends_with_1(write_run, tmp_path):
    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    saved = tmp_path / "plan.yaml"
    saved.write_text("the old one")
    files = sorted(tmp_path.iterdir())
    code, _, errors = headrace("plan", write_run("run"), "--save", saved, preexec_fn=no_room)
    assert code == 1
    assert (
        errors.startswith("headrace: the disk is full (File too large): make room") and "Trace" not in errors
    )
    assert saved.read_text() == "the old one"
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "run.yaml"])


def test_standard_output_that_is_full_or_closed_ends_with_1(write_run):
    path, sentence = (
        write_run(train__steps=200),
        "headrace: standard output takes no more ({}): the command was ",
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "headrace", "plan", path]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=cli_process.TIMEOUT
        )
    assert (done.returncode, done.stderr) == (
        1,
        sentence.format("No space left on device") + "stopped there\n",
    )
    command = [sys.executable, "-m", "headrace", "train", path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # as `headrace train RUN.yaml | head -1`
        assert process.stdout.readline().startswith("fresh run")
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, sentence.format("Broken pipe") + "stopped there\n")


# -- from a plan to an answer ------------------------------------------------------------------------------


def test_a_saved_plan_is_a_run_file(write_run, quick, tmp_path):
    whole, path, saved = (
        write_run("whole"),
        write_run("planned", train__micro_batch="auto"),
        tmp_path / "p.yaml",
    )
    code, printed, _ = headrace("plan", path, "train.micro_batch=2", "--save", saved)
    assert code == 0 and f"Saved  {saved}: run it with headrace train {saved}" in printed
    assert headrace("plan", saved)[1] == printed[: printed.index("Saved")]
    assert quick("train", saved)[0] == 0
    train(whole)
    assert evidence.all_of(path) == evidence.all_of(whole)


def test_train_show_export_and_sample(write_run, quick, tmp_path):
    path = write_run()
    home, out = evidence.home(path), tmp_path / "exported"
    code, printed, errors = headrace("train", path)
    assert (code, errors) == (0, ""), errors
    assert printed.startswith("fresh run · ") and printed.endswith(
        f'Try    headrace sample {home}/model "Hello"\n'
    )
    code, shown, _ = headrace("show", home)
    lines = shown.splitlines()
    assert code == 0 and "/model/config.json, bf16, update sync" in lines[0]
    assert any(line.startswith("step 8: loss ") for line in lines)
    assert {"checkpoints: checkpoint-6, checkpoint-8", f"Model  {home}/model"} <= set(lines)
    measured = [line for line in printed.splitlines() if line.startswith(("ram peak", "down a step"))]
    assert len(measured) == 2 and set(measured) <= set(lines)
    check_exports(home, out, quick)
    answers = [quick("sample", model, "water mill", "--tokens", "8") for model in (home / "model", out, out)]
    assert answers[0][0] == 0 and answers[0][1].strip()
    assert answers == [answers[0]] * 3


def check_exports(home, out, quick):
    """An export is the run's own model; as fp32 it is the master weights."""
    code, printed, errors = quick("export", home, out)
    assert (code, errors) == (0, "")
    assert re.fullmatch(rf"Model  {out}: step 8, 20 tensors written, read back, equal\n", printed)
    files = sorted(file.name for file in (home / "model").iterdir())
    assert sorted(file.name for file in out.iterdir()) == files
    assert {
        name for name in files if (out / name).read_bytes() != (home / "model" / name).read_bytes()
    } == set()
    assert_one_sentence(quick("export", home, out), 2, "exported exists already; choose another")
    assert_one_sentence(
        quick("export", home, f"{out}2", "--dtype", "int4"), 2, "--dtype int4 .*bf16 or .*fp32"
    )
    assert quick("export", home, f"{out}32", "--dtype", "fp32")[0] == 0
    masters, written = evidence.table(home, "master", 8), load_file(f"{out}32/model.safetensors")
    assert written.keys() == masters.keys()
    assert all(torch.equal(written[name], master) for name, master in masters.items())
