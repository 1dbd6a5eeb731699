"""How long to train and how a step divides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.training.config import TrainConfig


def test_one_epoch_is_the_default() -> None:
    assert TrainConfig().epochs == 1
    assert TrainConfig().total_steps(13) == 13


def test_steps_replace_epochs() -> None:
    config = TrainConfig(steps=7)
    assert config.epochs is None
    assert config.total_steps(13) == 7


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.5, 7), ("1e-1", 2), (0.001, 1), (3, 39), (0.7, 10), (1e-9, 1)]
)
def test_part_of_an_epoch_is_rounded_up(epochs: float, steps: int) -> None:
    assert TrainConfig.model_validate({"epochs": epochs}).total_steps(13) == steps


def test_both_lengths_are_a_conflict() -> None:
    with pytest.raises(ValidationError, match=r"train.steps=7 and train.epochs=2 contradict each other"):
        TrainConfig(steps=7, epochs=2)


def test_what_is_written_reads_back() -> None:
    config = TrainConfig(epochs=2, batch=6, micro_batch=3)
    assert TrainConfig.model_validate(config.model_dump()) == config


@given(batch=st.integers(1, 64), micro_batch=st.integers(1, 64))
def test_batch_is_a_multiple_of_micro_batch(batch: int, micro_batch: int) -> None:
    if batch % micro_batch == 0:
        assert TrainConfig(batch=batch, micro_batch=micro_batch).accumulation * micro_batch == batch
        return
    with pytest.raises(ValidationError, match=rf"batch={batch} .* train.micro_batch={micro_batch};") as error:
        TrainConfig(batch=batch, micro_batch=micro_batch)
    proposed = int(str(error.value).split("example train.micro_batch=")[1].split()[0])
    assert TrainConfig(batch=batch, micro_batch=proposed).micro_batch == proposed


def test_micro_batch_may_be_left_to_the_plan() -> None:
    assert TrainConfig().micro_batch == "auto"
