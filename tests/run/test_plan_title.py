"""The first line of a plan names the model so that one knows which it is."""

import shutil

import pytest

from headrace.run.plan import plan


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model", "model"),
        ("model/", "model"),
        ("model/config.json", "model/config.json"),
        ("model/tiny.json", "tiny.json"),
        (".", "there"),
        ("config.json", "there/config.json"),
    ],
)
def test_the_model_is_named(write_run, tiny, tmp_path, monkeypatch, path, name):
    there = tmp_path / "there"
    shutil.copytree(tiny / "model", there)
    shutil.copytree(tiny / "model", there / "model")
    shutil.copy(there / "config.json", there / "model" / "tiny.json")
    monkeypatch.chdir(there)
    assert plan(write_run(model__path=path)).text().split(", ")[0] == name
