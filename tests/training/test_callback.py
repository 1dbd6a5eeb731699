"""OffloadedAdamW in Hugging Face's own Trainer: the numbers of torch's AdamW, and no clipping that isn't."""

import copy

import law_one
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from headrace import OffloadedAdamW, TrainerCallback
from headrace.errors import UserError

STEPS, CLIP = 4, 0.5
STEPS_OF = {1: STEPS, 2: STEPS, 3: 8}
"""Accumulation -> steps: of three micro-batches each, the seventh step ends the epoch with two."""
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.fixture
def data():
    """Rows of unequal numbers of trained tokens."""
    ids = torch.randint(0, 128, (40, 16), generator=torch.Generator().manual_seed(3))
    rows = []
    for number, row in enumerate(ids):
        labels = row.clone()
        labels[: number % 9] = -100
        rows.append({"input_ids": row, "labels": labels})
    return rows


@pytest.fixture
def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))
    return lambda: copy.deepcopy(model)


@pytest.fixture
def run_trainer(data, tmp_path):
    """Trains with Trainer and an optimizer; returns the logs of its steps."""

    def run(model, optimizer, *, clip, callbacks=(), accumulate=2, resume=None, prepare=None, **options):
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulate,
            max_grad_norm=clip,
            lr_scheduler_type="linear",
            warmup_steps=1,
            logging_steps=1,
            **{"max_steps": STEPS, "save_strategy": "no", "report_to": [], **options},
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[*callbacks]
        )
        if prepare is not None:
            prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
        return [record for record in trainer.state.log_history if "loss" in record]

    return run


def offloaded(model, **options):
    return OffloadedAdamW(model.parameters(), **SETTINGS, workers=2, **options)


def released(model, accumulate=2):
    optimizer = offloaded(model, release_gradients=True, max_grad_norm=CLIP, micro_batches=accumulate)
    return optimizer, [TrainerCallback(optimizer)]


def assert_same(one, two):
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("accumulate", STEPS_OF)
def test_with_gradients_in_place_trainer_clips_and_the_bits_are_torchs(make_model, run_trainer, accumulate):
    ours, theirs = make_model(), make_model()
    optimizer = offloaded(ours)
    length = {"clip": CLIP, "accumulate": accumulate, "max_steps": STEPS_OF[accumulate]}
    logs = run_trainer(ours, optimizer, callbacks=[TrainerCallback(optimizer)], **length)
    reference = torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True)
    expected = run_trainer(theirs, reference, **length)
    assert_same(ours, theirs)
    for key in ("loss", "learning_rate", "grad_norm"):
        assert [log[key] for log in logs] == [log[key] for log in expected], key
    assert all(log["grad_norm"] > CLIP for log in expected), "clipping must act"


@pytest.mark.parametrize("accumulate", STEPS_OF)
@pytest.mark.parametrize("release", [True, False])
def test_given_the_same_coefficient_the_bits_are_torchs(make_model, run_trainer, accumulate, release):
    """The optimizer clips by law 1's norm, and so does the reference."""
    ours, theirs = make_model(), make_model()
    optimizer = offloaded(ours, release_gradients=release, max_grad_norm=CLIP, micro_batches=accumulate)
    callbacks = [TrainerCallback(optimizer)]
    length = {"clip": 0, "accumulate": accumulate, "max_steps": STEPS_OF[accumulate]}
    logs = run_trainer(ours, optimizer, callbacks=callbacks, **length)
    reference = law_one.clipping_adamw(theirs.parameters(), CLIP, **SETTINGS)
    expected = run_trainer(theirs, reference, **length)
    assert_same(ours, theirs)
    assert [log["loss"] for log in logs] == [log["loss"] for log in expected]
    assert optimizer.norm.value > CLIP, "clipping must act"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_released_gradients_the_clipping_is_the_optimizers(make_model, run_trainer, accumulate):
    """Released or not, the bits are the same; the true norm, before clipping, stands in Trainer's logs."""
    ours, kept, theirs = make_model(), make_model(), make_model()
    optimizer, callbacks = released(ours, accumulate)
    logs = run_trainer(ours, optimizer, clip=0, callbacks=callbacks, accumulate=accumulate)
    inside = offloaded(kept, max_grad_norm=CLIP)
    run_trainer(kept, inside, clip=0, callbacks=[TrainerCallback(inside)], accumulate=accumulate)
    reference = torch.optim.AdamW(theirs.parameters(), **SETTINGS, fused=True)
    expected = run_trainer(theirs, reference, clip=CLIP, accumulate=accumulate)
    assert_same(ours, kept)
    # The first step's rate is 0, so two steps see equal weights; torch sums the norm in fp32, we in fp64.
    norms = [[log["grad_norm"] for log in found[:2]] for found in (logs, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6, abs=0)
    assert logs[-1]["grad_norm"] == optimizer.norm.value
    assert [log["skipped_steps"] for log in logs] == [0] * STEPS
    assert all(log["grad_norm"] > CLIP for log in logs), "clipping must act"


def test_clipping_by_trainer_is_refused_when_it_would_clip_nothing(make_model, run_trainer):
    model = make_model()
    optimizer, callbacks = released(model)
    sentence = (
        r"max_grad_norm=1\.0\) would clip nothing, .*set it to 0 and pass max_grad_norm to OffloadedAdamW"
    )
    with pytest.raises(UserError, match=sentence):
        run_trainer(model, optimizer, clip=1.0, callbacks=callbacks)
    assert_same(model, make_model())
    optimizer.close()


def test_two_who_clip_are_refused(make_model, run_trainer):
    model = make_model()
    optimizer = offloaded(model, max_grad_norm=CLIP)
    sentence = (
        r"max_grad_norm=1\.0\) and OffloadedAdamW\(max_grad_norm=0\.5\) would both clip: set one .* to 0"
    )
    with pytest.raises(UserError, match=sentence):
        run_trainer(model, optimizer, clip=1.0, callbacks=[TrainerCallback(optimizer)])
    assert_same(model, make_model())
    optimizer.close()


def test_different_accumulations_are_refused(make_model, run_trainer):
    model = make_model()
    optimizer, callbacks = released(model, accumulate=1)
    with pytest.raises(UserError, match=r"gradient_accumulation_steps=2\) and .*micro_batches=1\) differ"):
        run_trainer(model, optimizer, clip=0, callbacks=callbacks)
    optimizer.close()


def test_loss_scaling_is_refused_when_its_gradients_are_gone(make_model, run_trainer):
    model = make_model()
    optimizer, callbacks = released(model)
    with pytest.raises(UserError, match=r"fp16=True\) .*train in bf16, or .*release_gradients=False"):
        run_trainer(model, optimizer, clip=0, callbacks=callbacks, fp16=True)
    optimizer.close()


def test_a_callback_of_another_optimizer_is_refused(make_model, run_trainer):
    model, other = make_model(), make_model()
    optimizer, callbacks = released(other)
    reference = torch.optim.AdamW(model.parameters(), **SETTINGS)
    with pytest.raises(UserError, match=r"Trainer trains with AdamW at .*TrainerCallback belongs to Offl"):
        run_trainer(model, reference, clip=0, callbacks=callbacks)
    optimizer.close()


def test_trainers_own_checkpoints_keep_moments_and_master_weights(make_model, run_trainer, tmp_path):
    """In bf16, where master weights hold more than the model that is saved beside them."""
    whole, again = make_model().bfloat16(), make_model().bfloat16()
    saving = {"save_strategy": "steps", "save_steps": 2}
    for model, resume in ((whole, None), (again, str(tmp_path / "out" / "checkpoint-2"))):
        optimizer, callbacks = released(model)
        logs = run_trainer(model, optimizer, clip=0, callbacks=callbacks, resume=resume, **saving)
        assert len(logs) == STEPS
    assert_same(again, whole)


@pytest.mark.parametrize("release", [True, False])
def test_a_state_that_the_checkpoint_lacks_is_missed(make_model, run_trainer, tmp_path, release):
    """Trainer itself would go on with new moments and without a word."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "accumulate": 1}
    first = offloaded(model := make_model(), release_gradients=release)
    run_trainer(model, first, clip=0, **saving)
    second = offloaded(model := make_model(), release_gradients=release)
    with pytest.raises(
        UserError, match=r"goes on at step 2, .* no state of the optimizer: .*save_only_model"
    ):
        run_trainer(
            model,
            second,
            clip=0,
            callbacks=[TrainerCallback(second)],
            resume=str(tmp_path / "out" / "checkpoint-2"),
            **saving,
        )
    second.close()


def shown_norms(folder):
    """The gradient norms that TensorBoard shows, by step."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.value for event in accumulator.Scalars("train/grad_norm")]


@pytest.mark.parametrize("given", [True, False])
def test_tensorboard_shows_the_true_norm_where_the_callback_is_first(
    make_model, run_trainer, tmp_path, monkeypatch, given
):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "shown"))
    optimizer, callbacks = released(model := make_model())
    logs = run_trainer(
        model,
        optimizer,
        clip=0,
        callbacks=callbacks if given else [],
        prepare=callbacks[0].put_first,
        report_to=["tensorboard"],
    )
    norms = [log["grad_norm"] for log in logs]
    assert shown_norms(tmp_path / "shown") == pytest.approx(norms, rel=1e-6, abs=0), "it keeps fp32"
    assert min(norms) > CLIP and norms[-1] == optimizer.norm.value
    assert [log["skipped_steps"] for log in logs] == [0] * STEPS, "called once"


def test_a_norm_that_tensorboard_would_not_show_is_missed(make_model, run_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "shown"))
    optimizer, callbacks = released(model := make_model())
    with pytest.warns(
        UserWarning, match=r"tensorboard will show a gradient norm of 0, .*put_first\(trainer\)"
    ):
        logs = run_trainer(model, optimizer, clip=0, callbacks=callbacks, report_to=["tensorboard"])
    assert shown_norms(tmp_path / "shown") == [0.0] * STEPS
    assert all(log["grad_norm"] > CLIP for log in logs), "Trainer's own history has it all the same"
