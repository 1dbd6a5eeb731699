import os
import re
import warnings
from dataclasses import replace

import checkpoint_example as example
import pytest
import torch

from headrace.checkpoint.directory import list_checkpoints
from headrace.checkpoint.manifest import DamagedCheckpoint, Environment, Manifest
from headrace.checkpoint.restore import choose_checkpoint, find_checkpoint, leave_behind, open_checkpoint
from headrace.checkpoint.save import save_checkpoint
from headrace.errors import UserError
from headrace.memory.tensorfile import Entry


@pytest.fixture
def run(tmp_path, no_fsync):
    """Complete checkpoints of steps 10 and 20."""
    example.save(tmp_path, 10, keep=2)
    example.save(tmp_path, 20, keep=2)
    return tmp_path


def names_and_bytes(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def check_passed_over(run, reason):
    """The newest is named with the reason, the previous one chosen, and nothing touched."""
    before = names_and_bytes(run)
    with pytest.warns(UserWarning, match=reason):
        checkpoint = find_checkpoint(run)
    assert checkpoint.step == 10
    example.check(checkpoint)
    assert names_and_bytes(run) == before


@pytest.mark.parametrize("name", example.FILES)
@pytest.mark.parametrize("left", [0, 1, 0.5, -1])
def test_a_truncated_file_is_named_and_the_previous_one_chosen(run, name, left):
    path = run / "checkpoint-20" / name
    size = path.stat().st_size
    os.truncate(path, int(left * size) if left == 0.5 else left % size)
    check_passed_over(run, re.escape(str(path)))


@pytest.mark.parametrize("name", example.FILES)
def test_a_missing_file_is_named_and_the_previous_one_chosen(run, name):
    (run / "checkpoint-20" / name).unlink()
    check_passed_over(run, name)


@pytest.mark.parametrize("name", example.FILES)
def test_a_flipped_bit_is_named_and_the_previous_one_chosen(run, name):
    path = run / "checkpoint-20" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    check_passed_over(run, re.escape(str(path)))


@pytest.mark.parametrize("name", example.FILES)
def test_every_flipped_bit_is_found(run, name):
    path = run / "checkpoint-20" / name
    whole = path.read_bytes()
    bits = range(8) if name == "manifest.json" else (0, 7)
    with open(path, "r+b", buffering=0) as file:
        for at in range(len(whole)):
            for bit in bits:
                os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << bit]), at)
                with pytest.raises(DamagedCheckpoint, match=name):
                    open_checkpoint(path.parent)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    example.check(open_checkpoint(path.parent))


def test_an_empty_or_renamed_directory_is_no_checkpoint(run):
    (run / "checkpoint-20").rename(run / "checkpoint-30")
    (run / "checkpoint-40").mkdir()
    with pytest.warns(UserWarning) as warned:
        assert find_checkpoint(run).step == 10
    assert "manifest.json cannot be read" in str(warned[0].message)
    assert "holds step 20: it was renamed" in str(warned[1].message)


def test_when_all_are_damaged_it_is_an_error_that_names_them(run):
    for step in (10, 20):
        (run / f"checkpoint-{step}" / "state.json").unlink()
    before = names_and_bytes(run)
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"checkpoint-20.*checkpoint-10.*never"):
        find_checkpoint(run)
    assert names_and_bytes(run) == before


def test_a_format_of_the_future_is_neither_read_nor_passed_over(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("headrace.checkpoint.manifest.FORMAT", 7)
        example.save(run, 30, keep=3)
    with pytest.raises(UserError, match="has format 7"):
        find_checkpoint(run)


def test_no_checkpoint_is_a_fresh_start(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert choose_checkpoint(tmp_path / "not there", "auto", example.ENVIRONMENT) is None


def test_choices(run):
    assert choose_checkpoint(run, "auto", example.ENVIRONMENT).step == 20
    assert choose_checkpoint(run, 10, example.ENVIRONMENT).step == 10
    assert choose_checkpoint(run, "never", example.ENVIRONMENT) is None
    with pytest.raises(UserError, match=r"resume=15: .* there are: 10, 20"):
        choose_checkpoint(run, 15, example.ENVIRONMENT)
    (run / "checkpoint-20" / "state.json").unlink()
    with pytest.raises(UserError, match=r"resume=20: .*state\.json is missing; other steps there are: 10"):
        choose_checkpoint(run, 20, example.ENVIRONMENT)


def test_another_environment_warns_old_and_new(run):
    now = Environment("AVX2", "none", {**example.ENVIRONMENT.versions, "torch": "2.99.0"}, {"cpu": 4}, 2)
    with pytest.warns(UserWarning) as warned:
        assert choose_checkpoint(run, "auto", now).step == 20
    text, old = str(warned[0].message), example.ENVIRONMENT
    assert f"instruction_set: {old.instruction_set} -> AVX2" in text
    assert f"versions.torch: {old.versions['torch']} -> 2.99.0" in text
    assert "threads.cpu: 2 -> 4" in text and "ranks: 1 -> 2" in text and "python" not in text


def test_the_same_environment_is_silent(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_checkpoint(run, "auto", Environment.here({"cpu": 2}))
    assert Manifest.read(run / "checkpoint-20").environment == example.ENVIRONMENT


@pytest.mark.parametrize(("start", "left"), [(None, [0, 10, 20, 21]), (10, [20, 21]), (20, [21])])
def test_a_run_leaves_later_checkpoints_behind(run, start, left):
    for step in (0, 21):
        (run / f"checkpoint-{step}").mkdir()
    chosen = choose_checkpoint(run, "never" if start is None else start, example.ENVIRONMENT)
    with pytest.warns(UserWarning) as warned:
        asides = leave_behind(run, chosen)
    assert [path.name for path in asides] == [f"checkpoint-{step}.set-aside" for step in left]
    assert len(warned) == len(left) and all(path.is_dir() for path in asides)
    assert list(list_checkpoints(run)) == [step for step in (0, 10, 20, 21) if step not in left]


def test_one_parameter_into_pieces_of_any_size_and_dtype(run):
    target = torch.zeros(21, dtype=torch.float64)
    find_checkpoint(run).read_into("exp_avg", "embed.weight", target.split(8))
    assert torch.equal(target, torch.full((21,), 201.0, dtype=torch.float64))
    with pytest.raises(UserError, match=r"exp_avg\.safetensors holds no bias"):
        find_checkpoint(run).read_into("exp_avg", "bias", [target])


def test_missing_left_over_and_reshaped_parameters_are_named(run):
    shapes = {**example.SHAPES, "embed.weight": (3, 7), "head.weight": (2,)}
    del shapes["norm.weight"]
    entries, tensors = example.tables_of(-1, shapes)
    with pytest.raises(UserError) as error:
        example.restore(find_checkpoint(run), entries)
    assert "embed.weight is torch.float32 (7, 3), not torch.float32 (3, 7); " in str(error.value)
    assert "head.weight is missing; norm.weight is not in the model" in str(error.value)
    assert torch.equal(tensors["master"]["scale"], torch.tensor(-10.0)), "nothing may have been read"


def test_another_dtype_is_refused(run):
    entries, _ = example.tables_of(-1)
    entries["exp_avg"] = [replace(entry, dtype=torch.bfloat16) for entry in entries["exp_avg"]]
    with pytest.raises(UserError, match=r"exp_avg\.safetensors .*torch\.float32 .*not torch\.bfloat16"):
        example.restore(find_checkpoint(run), entries)


def test_many_faults_are_counted(run):
    entries, _ = example.tables_of(-1, {f"layer{i}": (1,) for i in range(9)})
    with pytest.raises(UserError, match=r"\(embed\.weight is not in the model; .*; 8 more\)"):
        example.restore(find_checkpoint(run), entries)


@pytest.mark.parametrize("change", [lambda t: t.pop("exp_avg"), lambda t: t.update(exp_avg_sq=[])])
def test_tables_must_be_the_same(run, change):
    entries, _ = example.tables_of(-1)
    change(entries)
    with pytest.raises(UserError, match="holds the tables exp_avg, master, wanted are"):
        example.restore(find_checkpoint(run), entries)


def test_resuming_takes_no_memory_beside_the_pieces(tmp_path, peak_memory):
    tensor = torch.ones(2**24)
    tables = {"master": [Entry("weight", torch.float32, (2**24,), lambda: tensor.split(2**18))]}
    save_checkpoint(tmp_path, 1, tables, {}, environment=example.ENVIRONMENT, keep=1)
    tensor.zero_()
    assert peak_memory(lambda: example.restore(find_checkpoint(tmp_path), tables)) < 8 << 20
    assert torch.equal(tensor, torch.ones(2**24))
