"""Verdicts: what does not fit is named, and every knob that is proposed makes it fit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import config_of

from headrace.config import format_size, parse_size
from headrace.machine.machine import Machine
from headrace.machine.presets import preset
from headrace.planner.fit import Fix, Verdict, judge
from headrace.planner.memory import predict
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload

MIB, GIB = 2**20, 2**30

SHAPE = ModelShape.from_config(
    config_of("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, vocab_size=30000)
)
WORK = Workload(1024, 8, 2, dtype="fp32", activations="keep")
PLAIN = Machine("plain", 2, {"ram": 64 * GIB})


def plain(budget: int) -> Machine:
    return Machine("plain", 2, {"ram": budget})


def needs(work: Workload = WORK) -> int:
    return predict(SHAPE, work, PLAIN).total("ram")


def settings_of(verdict: Verdict) -> list[str]:
    return [" ".join(fix.settings) for fix in verdict.fixes]


def test_what_fits_needs_no_fix() -> None:
    verdict = judge(SHAPE, WORK, PLAIN)
    assert verdict.fits and not verdict.fixes and not verdict.short
    assert str(verdict) == "FITS."
    assert judge(SHAPE, WORK, plain(needs())).fits
    assert not judge(SHAPE, WORK, plain(needs() - 1)).fits


def test_a_budget_below_what_the_machine_has_is_raised_first() -> None:
    verdict = judge(SHAPE, WORK, PLAIN, {"ram": needs() - 300 * MIB})
    least = -(-needs() // (64 * MIB)) * 64 * MIB
    assert settings_of(verdict)[0] == f"memory.host={format_size(least)}"
    assert "RAM needs " in verdict.sentence and ", 300 MiB more than the " in verdict.sentence
    assert verdict.sentence.endswith(f"of memory.host: set {settings_of(verdict)[0]}")
    assert str(verdict).splitlines()[1:] == [f"  or {other}" for other in settings_of(verdict)[1:]]


def test_a_budget_is_raised_to_no_more_than_there_is() -> None:
    verdict = judge(SHAPE, WORK, plain(needs() + 7), {"ram": GIB})
    (setting,) = verdict.fixes[0].settings
    assert needs() <= parse_size(setting.removeprefix("memory.host=")) <= needs() + 7


def test_single_changes_that_suffice_are_offered_the_least_harm_first() -> None:
    verdict = judge(SHAPE, WORK, plain(needs() * 3 // 4))
    keys = [setting.split("=")[0] for setting in settings_of(verdict)]
    kept = ["train.micro_batch", "memory.activations", "memory.weights", "model.dtype", "data.context"]
    assert keys == kept
    assert all(len(fix.settings) == 1 for fix in verdict.fixes if fix.work.paths == ())


def test_changes_are_combined_where_none_suffices_and_none_is_made_in_vain() -> None:
    budget = needs(replace(WORK, activations="recompute", dtype="bf16").with_micro_batch(1)) + 10 * MIB
    (fix,) = judge(SHAPE, WORK, plain(budget)).fixes
    assert len(fix.settings) > 1
    for left_out in range(len(fix.settings)):
        kept = [setting for index, setting in enumerate(fix.settings) if index != left_out]
        assert needs(turned(WORK, kept)) > budget


def test_a_model_that_is_too_large_is_said_to_be() -> None:
    verdict = judge(SHAPE, WORK, plain(GIB // 4))
    assert not verdict.fixes
    assert verdict.sentence.endswith("no setting makes it fit; choose a smaller model")


def test_every_tier_that_lacks_memory_is_named() -> None:
    card = Machine("card", 2, {"device": GIB, "host": GIB})
    assert judge(SHAPE, WORK, card).short.keys() == {"device", "host"}
    sentence = judge(SHAPE, WORK, card).sentence
    assert "device needs" in sentence and "memory.device; host needs" in sentence


def test_a_preset_is_judged() -> None:
    assert judge(SHAPE, WORK, preset("card-12gb")).fits
    fitting = judge(SHAPE, replace(WORK, micro_batch=64), preset("card-8gb")).fixes
    assert fitting and all(not fix.settings[0].startswith("memory.d") for fix in fitting)


def turned(work: Workload, written: list[str]) -> Workload:
    """The workload with settings turned as a run file would."""
    for key, value in (setting.split("=") for setting in written):
        name = key.split(".")[1]
        if name == "micro_batch":
            work = work.with_micro_batch(int(value))
        elif name == "disk":
            work = replace(work, paths=(1.0,))
        elif name != "host":
            work = replace(work, **{name: int(value) if value.isdigit() else value})
    return work


def check(fix: Fix, work: Workload, machine: Machine) -> Iterator[bool]:
    yield fix.work == turned(work, list(fix.settings))
    ledger = predict(SHAPE, fix.work, machine)
    yield ledger.to_json() == fix.ledger.to_json()
    yield all(ledger.total(tier) <= allowed for tier, allowed in fix.budgets.items())
    yield all(fix.budgets[tier] <= max(capacity, 0) for tier, capacity in machine.tiers.items())


@settings(deadline=None, max_examples=25)
@given(
    share=st.floats(0.2, 1.2), budget=st.floats(0.1, 1.0), rows=st.integers(1, 12),
    kept=st.sampled_from(["keep", "recompute"]), dtype=st.sampled_from(["bf16", "fp32"])
)  # fmt: skip
def test_every_fix_really_fits(share: float, budget: float, rows: int, kept: str, dtype: str) -> None:
    work = replace(WORK, micro_batch=rows, activations=kept, dtype=dtype)
    machine = plain(int(share * needs(work)))
    verdict = judge(SHAPE, work, machine, {"ram": int(budget * machine.tiers["ram"])})
    assert verdict.fits or all(all(check(fix, work, machine)) for fix in verdict.fixes)


@pytest.mark.parametrize("word", ["train.micro_batch", "memory.activations", "data.context", "memory.host"])
def test_knobs_are_keys_of_the_run_file(word: str) -> None:
    from headrace.run.file import RunFile

    section, key = word.split(".")
    assert key in RunFile.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
