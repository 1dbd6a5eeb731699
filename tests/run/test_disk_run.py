"""Whole runs with states on the disk: the bits of runs in memory, exact resumption, figures as predicted."""

import json
import random
import signal
import sys
from pathlib import Path

import evidence
import pytest

from headrace.errors import UserError
from headrace.run.plan import plan
from headrace.run.train import train

sys.path.insert(0, str(Path(__file__).parent))
import deadly

TIMEOUT = 120


def on_disk(tmp_path, *names, window=1, **memory):
    disk = [{"path": str(tmp_path / name)} for name in names]
    memory = {"host": "4GiB", "states": "disk", "disk": disk, **memory}
    return {"memory": memory, "update": {"bucket": 2**16, "window": window}}


def execute(processes, *arguments):
    process = processes.Process(target=deadly.run, args=arguments)
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


@pytest.fixture
def larger(tiny, tmp_path):
    """A model of several buckets; its weights are drawn at random."""
    directory = tmp_path / "larger"
    directory.mkdir()
    for path in (tiny / "model").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 128, "intermediate_size": 512}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory / "config.json")


@pytest.mark.parametrize("window", [1, 5, "auto"])
def test_weights_and_metrics_are_those_of_states_in_memory(write_run, larger, tmp_path, window):
    in_memory = write_run("memory", model__path=larger)
    disk = write_run("disk", model__path=larger, **on_disk(tmp_path, "a", "b", window=window))
    train(in_memory)
    train(disk)
    assert evidence.weights(disk) == evidence.weights(in_memory)
    assert evidence.metrics(disk) == evidence.metrics(in_memory)
    both = json.loads((evidence.home(disk) / "ledger.json").read_text())
    predicted, measured = both["predicted"], both["measured"]
    for tier, purpose in (("ram", "states"), ("ram", "buffers"), ("disk", "states")):
        assert measured["peaks"][tier][purpose] == predicted["peaks"][tier][purpose]
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists(), "files are left"


def test_predicted_bytes_of_each_path_are_measured(write_run, larger, tmp_path):
    disk = write_run("disk", model__path=larger, **on_disk(tmp_path, "a", "b", window=5))
    train(disk)
    both = json.loads((evidence.home(disk) / "ledger.json").read_text())
    lanes = {}
    for side, ledger in both.items():
        for action, (_, nbytes, _) in ledger["actions"].items():
            if "@" in action:
                kind = "READ" if "READ" in action else "WRITE"
                key = kind, action.partition("@")[2]
                lanes.setdefault(key, {}).setdefault(side, 0)
                lanes[key][side] += nbytes
    assert set(lanes) == {(kind, path) for kind in ("READ", "WRITE") for path in ("p0", "p1")}
    for sides in lanes.values():
        steps = both["measured"]["steps"]
        assert abs(sides["measured"] - sides["predicted"] * steps) < steps, "but for rounding of the mean"
        assert sides["measured"] > 0


def test_states_move_between_memory_and_disk_when_a_run_goes_on(write_run, larger, tmp_path):
    whole, moved = write_run("whole", model__path=larger), write_run("moved", model__path=larger)
    train(whole, ["optim.schedule=constant"])
    constant = ["optim.schedule=constant"]
    disk = ["memory.states=disk", f"memory.disk=[{{path: {tmp_path / 'a'}}}]", "update.bucket=65536"]
    two = [*disk[:1], f"memory.disk=[{{path: {tmp_path / 'a'}}}, {{path: {tmp_path / 'b'}}}]", disk[2]]
    train(moved, [*constant, "train.steps=2"])
    train(moved, [*constant, *disk, "train.steps=4"])
    train(moved, [*constant, *two, "train.steps=5"])
    train(moved, [*constant, *two[:2], "update.bucket=131072", "train.steps=6"])
    train(moved, constant)
    assert evidence.weights(moved) == evidence.weights(whole)
    assert evidence.states(moved) == evidence.states(whole)


def check_kills(processes, write_run, tmp_path, larger, seed, rounds, kills, **memory):
    chance = random.Random(seed)
    whole = write_run("whole", model__path=larger)
    assert execute(processes, whole) == 0
    died = 0
    for number in range(rounds):
        values = on_disk(tmp_path, f"a{number}", f"b{number}", window=number % 3 + 1, **memory)
        killed = write_run(f"killed{number}", model__path=larger, **values)
        for _ in range(kills):
            phase = chance.choice(["flush", "flush", *deadly.PHASES])
            first = chance.randrange(60 if phase == "flush" else 3)
            moment = (first, chance.uniform(0, 0.004 if phase == "flush" else 0.02))
            died += execute(processes, killed, (), phase, *moment) == -signal.SIGKILL
        assert execute(processes, killed) == 0
        assert evidence.weights(killed) == evidence.weights(whole)
        assert evidence.metrics(killed) == evidence.metrics(whole)
        assert not [*tmp_path.glob(f"[ab]{number}/headrace-*")], "files are left"
    return died


def test_a_few_kills(processes, write_run, tmp_path, larger):
    assert check_kills(processes, write_run, tmp_path, larger, seed=3, rounds=1, kills=3) >= 1


@pytest.mark.slow
def test_twenty_kills(processes, write_run, tmp_path, larger):
    died = check_kills(processes, write_run, tmp_path, larger, seed=4, rounds=10, kills=4)
    print(f"{died} SIGKILLs, 10 runs, all equal bit for bit")
    assert died >= 20


def test_a_path_of_another_run_is_refused_with_its_process(write_run, larger, tmp_path):
    from headrace.memory.lock import DirectoryLock

    path = write_run("disk", model__path=larger, **on_disk(tmp_path, "a"))
    with (
        DirectoryLock(tmp_path / "a", ".headrace-r0-lock", "memory.disk"),
        pytest.raises(UserError, match=r"this process .*choose another memory\.disk"),
    ):
        train(path)


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        ("[{path: x, siz: 4}]", r"memory\.disk\.0\.siz .*did you mean memory\.disk\.0\.size"),
        ("[{size: 4}]", r"memory\.disk\.0\.path is missing"),
        ("[x]", r"memory\.disk\.0=x .*write its keys below it \(path, size\)"),
        ("x", r"memory\.disk=x .*must be a list"),
        ("[{path: x, size: many}]", r"memory\.disk\.0\.size=many .*is not a size"),
        ("[{path: x}, {path: ./x}]", r"memory\.disk names .*x twice"),
    ],
)
def test_a_wrong_list_of_paths_names_the_item(write_run, disk, message):
    with pytest.raises(UserError, match=message) as caught:
        plan(write_run(), ["memory.states=disk", f"memory.disk={disk}"])
    assert "\n" not in str(caught.value)


def test_what_cannot_work_is_refused_at_once(write_run, tmp_path):
    with pytest.raises(UserError, match=r"memory\.states=disk needs a place: set memory\.disk"):
        plan(write_run(), ["memory.states=disk"])
    with pytest.raises(UserError, match=r"memory\.disk has no effect.*set memory\.states=disk"):
        plan(write_run(), [f"memory.disk=[{{path: {tmp_path}}}]"])
    values = on_disk(tmp_path, "a")
    values["memory"]["disk"][0]["size"] = "1KiB"
    small = write_run("small", **values)
    assert "disk needs" in plan(small).text()
    with pytest.raises(UserError, match=r"DOES NOT FIT: disk needs .*memory\.disk"):
        train(small)
