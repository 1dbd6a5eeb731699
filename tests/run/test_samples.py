"""`headrace data`: the rows that training will see, what became of every record, and no trace in `out`."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys

import cli_process
import evidence
import pytest
import yaml
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig

from headrace.data.prepare import prepare
from headrace.errors import UserError
from headrace.models.load import load_tokenizer
from headrace.run.file import read_run_file
from headrace.run.samples import look
from headrace.run.train import train


def prepared(path, directory):
    """What training prepares, for one row at a time."""
    run = read_run_file(path)
    tokenizer, batch = load_tokenizer(run.model.path), run.train.batch
    return prepare(run.data, tokenizer, directory=directory, batch=batch, micro_batch=1, seed=run.train.seed)


def figures(view):
    """The first column of the counts by name."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in view.counts[1:]]
    return {row[0]: row[1] for row in rows}


def text_of(row):
    return ["".join(piece.text for piece in page.pieces) for page in row.pages]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_those_of_the_first_steps(write_run, tmp_path, packing):
    path = write_run(data__packing=packing, train__batch=2)
    view, data = look(path, samples=5), prepared(path, tmp_path / "data")
    batches = [batch for index in range(3) for batch in data.train.step(index)][:5]
    assert [len(row.pages) for row in view.rows] == [len(batch.documents) for batch in batches]
    assert [sum(page.trained for page in row.pages) for row in view.rows] == [b.valid_tokens for b in batches]
    assert [row.title.split(":")[0] for row in view.rows] == [
        "Step 1, row 1", "Step 1, row 2", "Step 2, row 1", "Step 2, row 2", "Step 3, row 1"
    ]  # fmt: skip
    for text in text_of(view.rows[0]):
        assert re.fullmatch(r"<s>user\n[a-z ]+</s>\n<s>assistant\n[a-z ]+</s>\n", text)


def test_answers_are_trained_and_nothing_else(write_run):
    for row in look(write_run()).rows:
        for page in row.pages:
            for piece in page.pieces:
                assert piece.trained == bool(re.fullmatch(r"[a-z ]+</s>", piece.text)), piece


def test_nothing_is_written_into_the_run(write_run):
    path = write_run()
    look(path)
    assert not evidence.home(path).exists()


def test_what_the_run_has_tokenised_is_used_and_stays(write_run, monkeypatch):
    path = write_run()
    prepared(path, evidence.home(path) / "data")
    before = sorted(evidence.home(path).rglob("*"))
    from headrace.data import tokenise

    def refuse(*arguments):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokenise, "_documents", refuse)
    assert len(look(path).rows) == 3
    assert sorted(evidence.home(path).rglob("*")) == before
    with pytest.raises(AssertionError, match="tokenised again"):
        look(path, ["data.context=63"])


@pytest.fixture
def flawed(tiny, tmp_path):
    """The chats, four flawed records and one that is too long."""
    chat = [{"role": "user", "content": "mill"}, {"role": "assistant", "content": "wheel " * 100}]
    records = [{"text": "x"}, {"messages": []}, {"messages": [{"role": "user", "content": "a"}]}]
    lines = [json.dumps(record) for record in (*records, {"messages": chat})]
    path = tmp_path / "flawed.jsonl"
    path.write_text((tiny / "chats.jsonl").read_text("utf-8") + "\n".join([*lines, "{"]) + "\n", "utf-8")
    return str(path)


@pytest.mark.parametrize(("over_long", "cut", "long"), [("cut", "1", "0"), ("skip", "0", "1")])
def test_every_record_is_accounted_for_with_its_reason(write_run, flawed, over_long, cut, long):
    data = {"data__train": flawed, "data__eval": None, "data__format": "messages"}
    path = write_run(**data, data__bad_records="skip", data__over_long=over_long)
    view = look(path)
    found = figures(view)
    assert (found["records read"], found["skipped, flawed"], found["skipped, too long"]) == ("65", "4", long)
    assert (found["used"], found["cut to the context"]) == (str(61 - int(long)), cut)
    reasons = (
        "train: skipped because it has no field 'messages' (1); has no list of messages in 'messages' (1); "
        "has no message of the role 'assistant' (1); is not whole, valid JSON (1)"
    )
    assert reasons in view.remarks
    assert any("4 records skipped, the first: " in remark for remark in view.remarks)


def test_counts_are_those_of_the_loader(write_run, tmp_path):
    path = write_run()
    found, train = figures(look(path)), prepared(path, tmp_path / "data").train
    expected = {
        "documents": train.documents,
        "tokens": train.tokens,
        "trained": train.trained_tokens,
        "rows of 64": train.rows,
        "steps an epoch": train.steps_per_epoch,
    }
    assert {name: int(found[name].replace(",", "")) for name in expected} == expected
    assert found["trained share"] == f"{train.trained_tokens / train.tokens:.1%}"


def test_data_are_refused_as_training_does(write_run, flawed):
    with pytest.raises(UserError, match=r"flawed\.jsonl:6\d .* data\.bad_records=skip"):
        look(write_run(data__train=flawed, data__format="messages"))


def test_a_model_without_a_tokenizer_is_named(write_run, tiny, tmp_path):
    shutil.copy(tiny / "model" / "config.json", tmp_path)
    with pytest.raises(UserError, match="has no tokenizer beside it"):
        look(write_run(model__path=str(tmp_path / "config.json")))


@pytest.mark.parametrize("special", [True, False])
def test_a_token_without_a_row_is_refused_as_training_does(write_run, tiny, tmp_path, special):
    shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    LlamaConfig.from_pretrained(tmp_path / "model", vocab_size=len(tokenizer)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.add_tokens([AddedToken("<picture>", special=special)], special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [{"role": "user", "content": "a <picture>"}, {"role": "assistant", "content": "mill"}]
    (tmp_path / "picture.jsonl").write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    values = {"model__path": str(tmp_path / "model" / "config.json"), "data__eval": None}
    look(write_run(**values))
    path = write_run(**values, data__train=str(tmp_path / "picture.jsonl"))
    sentences = []
    for act in (look, train):
        with pytest.raises(
            UserError, match=r"has the token '<picture>' of id \d+, but the model only"
        ) as caught:
            act(path)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]


# -- what is printed ---------------------------------------------------------------------------------------


def test_it_prints_marks_where_it_cannot_dim(write_run, processes, tmp_path):
    path = write_run()
    code, printed, errors = cli_process.execute(processes, tmp_path / "printed", ["data", path])
    assert (code, errors) == (0, "")
    assert printed.startswith("‹marked› text is read, the rest is trained\n\nStep 1, row 1: ")
    assert re.search(
        r"── document 1: \d+ tokens, \d+ trained ─+\n‹<s>user\n[a-z ]+</s>\n<s>assistant\n›[a-z]", printed
    )
    assert "\x1b" not in printed and "records read" in printed


def test_rows_can_be_left_out(write_run, processes, tmp_path):
    arguments = ["data", write_run(), "--samples", "0"]
    code, printed, _ = cli_process.execute(processes, tmp_path / "printed", arguments)
    assert code == 0 and "Step" not in printed and printed.split()[:2] == ["train", "eval"]


def on_a_terminal(path, **variables):
    """What `headrace data` prints on a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace", "data", str(path), "--samples", "1"]
    environment = {**os.environ, "TERM": "xterm", **variables}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        parts = []
        while part := _read(ours):
            parts.append(part)
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # how a terminal ends
        return b""


def test_a_terminal_gets_dimmed_text_unless_it_wants_no_styles(write_run):
    path = write_run()
    dimmed = on_a_terminal(path, NO_COLOR="")
    assert (
        re.search(r"\x1b\[2m<s>user\n[a-z ]+</s>\n<s>assistant\n\x1b\[0m[a-z]", dimmed) and "‹" not in dimmed
    )
    plain = on_a_terminal(path, NO_COLOR="1")
    assert "\x1b" not in plain and "‹<s>user" in plain
    assert yaml.safe_load(path.read_text("utf-8"))["data"]["context"] == 64
