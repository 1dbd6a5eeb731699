"""What people get wrong ends with code 2 and one sentence: the value, the place and the fix.

The answers are shown where these tests are asked for alone: ``pytest tests/run/test_mistakes.py``.
"""

import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext

import cli_process
import pytest
from desk import Desk
from mistakes import MISTAKES

from headrace.cli.main import main


@pytest.fixture(scope="module")
def desk(tiny, tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("desk"), tiny)


@pytest.fixture(scope="module")
def answers():
    """What was wrong -> what was said, in the order of the tests."""
    return {}


@pytest.fixture
def inside(capsys, monkeypatch):
    """Runs a command in this process; its exit code and its errors."""
    before = signal.getsignal(signal.SIGINT)

    def command(arguments):
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr().err

    yield command
    signal.signal(signal.SIGINT, before)


def outside(arguments):
    """The same in a process of its own."""
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=cli_process.TIMEOUT)
    return done.returncode, done.stderr


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_it_is_answered_in_one_sentence(desk, inside, answers, mistake):
    try:
        arguments = [str(argument) for argument in mistake.make(desk)]
        code, errors = (outside if mistake.real else inside)(arguments)
    finally:
        desk.clear()
    assert code == 2, errors
    assert errors.startswith("headrace: ") and errors.endswith("\n") and errors.count("\n") == 1, errors
    said = errors.removeprefix("headrace: ").strip()
    for needed in (mistake.value, mistake.place, mistake.fix):
        assert needed in said
    answers[mistake.what] = said.replace(f"{desk.home}/", "").replace(f"{desk.tiny}/", "")


def test_the_answers_differ_and_can_be_read(answers, capsys, request):
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 30
    assert len(set(answers.values())) == len(answers)
    alone = {item.path for item in request.session.items} == {request.path}
    with capsys.disabled() if alone else nullcontext():
        print()
        for number, (what, said) in enumerate(answers.items(), start=1):
            print(f"{number:2}. {what}")
            print(textwrap.fill(said, 100, initial_indent="    -> ", subsequent_indent="       "))
