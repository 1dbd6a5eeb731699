"""Which checkpoints stay, against a model that knows only the rule."""

import os
import tempfile
from pathlib import Path
from unittest import mock

import checkpoint_example as example
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.directory import list_checkpoints
from headrace.checkpoint.restore import find_checkpoint

# A save so many steps later that keeps so many, or damage to the so-many-th of those that stand.
saves = st.tuples(st.just("save"), st.integers(1, 3), st.integers(1, 4))
damages = st.tuples(st.just("damage"), st.integers(0, 9), st.sampled_from(example.FILES))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(saves, saves, damages), max_size=12))
def test_the_newest_complete_ones_stay_and_damaged_ones_are_left_alone(actions):
    step, complete, damaged = 0, [], []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync"):
        run = Path(folder)
        for action, number, detail in actions:
            if action == "save":
                step += number
                example.save(run, step, keep=detail)
                complete = [*complete, step][-detail:]
            elif complete:
                victim = complete.pop(number % len(complete))
                os.truncate(run / f"checkpoint-{victim}" / detail, 5)
                damaged.append(victim)
            assert list(list_checkpoints(run)) == sorted(complete + damaged)
            assert example.hidden(run) == []
        if complete and step == complete[-1]:
            assert find_checkpoint(run).step == step
