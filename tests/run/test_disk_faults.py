"""A disk that fails under a whole run: one sentence, the last checkpoint stands, the same command goes on."""

import sys
from pathlib import Path

import evidence
import pytest
from test_disk_run import execute, larger, on_disk

sys.path.insert(0, str(Path(__file__).parent))
import failing

__all__ = ["larger"]

TIMEOUT = 120
EVERYTHING = {"weights": "disk", "activations": "disk", "gradients": "disk"}
SENTENCES = {
    "ENOSPC": "No space left on device",
    "EIO on write": "Input/output error",
    "EIO on read": "Input/output error",
    "short read": "ends at byte",
    "changed byte": "has other bytes at",
    "path removed": "No such file or directory",
    "hang": "the disk hangs",
}


def go(processes, target, *arguments):
    process = processes.Process(target=target, args=arguments)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


@pytest.mark.parametrize("fault", failing.FAULTS)
def test_a_disk_that_fails(processes, write_run, larger, tmp_path, fault):
    whole = write_run("whole", model__path=larger)
    assert execute(processes, whole) == 0
    values = on_disk(tmp_path, "a", "b", **EVERYTHING)
    broken = write_run("broken", model__path=larger, **values)
    output = tmp_path / "said"
    code = go(
        processes, failing.run, broken, fault, 500 if "E" in fault[:1] or fault == "hang" else 150, output
    )
    words = output.with_suffix(".err").read_text()
    assert code == 1, words
    assert words.count("\n") == 1 and "Traceback" not in words, words
    assert SENTENCES[fault] in words and "go on from the last checkpoint" in words
    assert str(tmp_path) in words, "the file is named"
    assert evidence.steps(broken), "a checkpoint stands"
    assert not [*tmp_path.glob("[ab]/headrace-*")], "files of the failed run are left"
    assert execute(processes, broken) == 0
    assert evidence.weights(broken) == evidence.weights(whole)
    assert evidence.metrics(broken) == evidence.metrics(whole)
    assert not [*tmp_path.glob("[ab]/headrace-*")], "files are left"


def test_a_path_a_hundred_times_slower_is_named_and_changes_no_bit(processes, write_run, larger, tmp_path):
    whole = write_run("whole", model__path=larger)
    assert execute(processes, whole) == 0
    run = write_run("slow", model__path=larger, **on_disk(tmp_path, "fast", "slow"))
    output = tmp_path / "said"
    assert go(processes, failing.slow, run, output, 0.02) == 0
    assert evidence.weights(run) == evidence.weights(whole)
    assert output.with_suffix(".err").read_text() == ""
