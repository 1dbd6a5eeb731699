import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.checkpoint.changes import differences, refuse_changes
from headrace.checkpoint.config import CheckpointConfig
from headrace.errors import UserError

SAVED = {
    "train": {"steps": 100, "epochs": None, "batch": 8},
    "optim": {"lr": 1e-5, "schedule": "cosine"},
    "memory": {"host": "4GiB"},
    "checkpoint": {"every": 10},
    "report": ["tensorboard"],
    "reports": [],
}


def changed(**sections):
    return {**SAVED, **{name: {**SAVED[name], **values} for name, values in sections.items()}}


def test_nothing_changed():
    assert refuse_changes(SAVED, SAVED, accept=False) == []


def test_what_may_change():
    asked = changed(train={"steps": 200, "epochs": 3}, memory={"host": "8GiB"}, checkpoint={"keep": 2})
    assert refuse_changes(SAVED, {**asked, "report": []}, accept=False) == []


def test_other_changes_are_refused_old_to_new():
    asked = changed(
        train={"steps": 200, "batch": 16}, optim={"lr": 2e-5, "schedule": "linear", "beta1": None}
    )
    changes = ["train.batch: 8 -> 16", "optim.lr: 1e-05 -> 2e-05", "optim.schedule: cosine -> linear"]
    changes.append("optim.beta1: (not set) -> null")
    with pytest.raises(UserError, match=r"checkpoint\.accept_changes=true") as error:
        refuse_changes(SAVED, asked, accept=False)
    assert "; ".join(changes) in str(error.value)
    assert refuse_changes(SAVED, asked, accept=True) == changes


def test_a_section_that_only_begins_like_a_free_one_is_not_free():
    assert refuse_changes(SAVED, {**SAVED, "reports": ["x"]}, accept=True) == ['reports: [] -> ["x"]']


def test_a_section_that_came_or_went():
    without = {name: section for name, section in SAVED.items() if name != "optim"}
    assert differences(SAVED, without) == {
        "optim.lr": "1e-05 -> (not set)",
        "optim.schedule": "cosine -> (not set)",
    }
    assert differences({"update": "sync"}, {"update": {"policy": "sync"}}) == {
        "update": "sync -> (not set)",
        "update.policy": "(not set) -> sync",
    }


values = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers()))
trees = st.recursive(values, lambda inner: st.dictionaries(st.text("abc", max_size=2), inner, max_size=3))
plans = st.dictionaries(st.text("abc", min_size=1, max_size=2), trees, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans, plans)
def test_differences_are_empty_for_equals_only(old, new):
    assert differences(old, old) == {}
    assert bool(differences(old, new)) == (old != new)
    assert differences(old, new).keys() == differences(new, old).keys()


@pytest.mark.parametrize("resume", ["auto", "never", 0, 50])
def test_resume_as_it_is_written(resume):
    assert CheckpointConfig(resume=resume).resume == resume


@pytest.mark.parametrize(
    "wrong", [{"resume": "newest"}, {"resume": -1}, {"keep": 0}, {"every": -1}, {"kept": 2}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        CheckpointConfig(**wrong)
