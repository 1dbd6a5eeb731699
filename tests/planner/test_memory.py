"""The predicted ledger: what is exact by construction, and how it is put together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import config_of

from headrace.errors import UserError
from headrace.machine.machine import Machine
from headrace.memory.shapes import round_length as computed_length
from headrace.optim.kernel import CHUNK
from headrace.optim.offloaded import OffloadedAdamW
from headrace.optim.states import whole_blocks
from headrace.optim.store import STAGING
from headrace.planner import memory
from headrace.planner.disk import DISK_BLOCK
from headrace.planner.shape import ModelShape
from headrace.planner.workload import Workload, divisors, kernel_lengths, round_length
from headrace.schedule.action import Action, Kind
from headrace.schedule.layout import BLOCK
from headrace.training import loss
from headrace.training.loss import Head, chunked_cross_entropy

PLAIN = Machine("plain", 2, {"ram": 2**40})
CARD = Machine("card", 2, {"device": 2**40, "host": 2**40})
WORK = Workload(24, 2, 3, dtype="bf16", loss_chunk=16, bucket=2**16, workers=2)
SHAPE = ModelShape.from_config(config_of("llama tied", vocab_size=3001))

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def test_constants_are_those_of_the_code_that_they_describe() -> None:
    assert memory.KERNEL_SCRATCH == CHUNK * 4
    assert memory.NORM_SCRATCH == BLOCK * 8
    assert memory.HEAD_ROWS == loss._HEAD_ROWS
    assert Workload(1).staging == STAGING
    assert whole_blocks(1) == DISK_BLOCK


@given(length=st.integers(1, 10**6))
def test_lengths_are_rounded_as_attention_does(length: int) -> None:
    assert round_length(length) == computed_length(length)


def optimizer_of(shape: ModelShape, work: Workload) -> OffloadedAdamW:
    named = [
        (p.name, torch.nn.Parameter(torch.zeros(p.shape, dtype=DTYPES[work.dtype]))) for p in shape.parameters
    ]
    return OffloadedAdamW(
        named,
        release_gradients=True,
        micro_batches=work.micro_batches,
        bucket=work.bucket,
        workers=work.workers,
    )


@pytest.mark.parametrize("bucket", [2**16, 2**24])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pool_and_links_are_exact(dtype: str, micro_batches: int, bucket: int) -> None:
    work = replace(WORK, dtype=dtype, micro_batches=micro_batches, bucket=bucket)
    optimizer = optimizer_of(SHAPE, work)
    measured = optimizer.ledger.peaks["ram"]
    assert memory.pool_bytes(SHAPE, work, PLAIN) == measured
    for _ in range(micro_batches):
        sum(p.sum() for group in optimizer.param_groups for p in group["params"]).backward()
    optimizer.step()
    predicted = memory.predict(SHAPE, work, PLAIN)
    for lane in ("d2h", "h2d"):
        assert predicted.lane_bytes(lane) == optimizer.ledger.lane_bytes(lane)
    optimizer.close()


def test_links_by_hand() -> None:
    predicted = memory.predict(SHAPE, WORK, PLAIN)
    assert {action: account.nbytes for action, account in predicted.actions.items()} == {
        Action(Kind.DOWN): 3 * SHAPE.numel * 2,
        Action(Kind.UP): SHAPE.numel * 2,
    }


def test_gradients_land_before_they_are_summed_where_there_is_a_card() -> None:
    plain, card = (memory.pool_bytes(SHAPE, WORK, machine)["buffers"] for machine in (PLAIN, CARD))
    assert card - plain == min(2**16, SHAPE.aligned_numel) * 2
    single = replace(WORK, micro_batches=1)
    assert memory.pool_bytes(SHAPE, single, CARD) == memory.pool_bytes(SHAPE, single, PLAIN)


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 40), chunk=st.integers(1, 50), dtype=st.sampled_from(sorted(DTYPES)),
    capped=st.booleans()
)  # fmt: skip
def test_logits_are_those_that_the_loss_names(tokens: int, chunk: int, dtype: str, capped: bool) -> None:
    shape = replace(SHAPE, logit_cap=30.0 if capped else None)
    work = Workload(tokens, dtype=dtype, loss_chunk=chunk)  # type: ignore[arg-type]
    named = loss.loss_bytes(tokens, shape.vocab, shape.hidden, chunk, DTYPES[dtype], softcap=capped)
    assert memory.loss_bytes(shape, work) == named


def test_the_loss_saves_nothing_through_autograd() -> None:
    saved = []
    hidden = torch.randn(6, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        head = Head(torch.randn(5, 8, requires_grad=True))
        chunked_cross_entropy(hidden, head, torch.arange(6) % 5, scale=1.0, chunk=4)
    assert not saved


def test_without_a_card_everything_is_one_tier() -> None:
    predicted = memory.predict(SHAPE, WORK, PLAIN)
    assert predicted.peaks.keys() == {"ram"}
    assert predicted.peaks["ram"].keys() == {
        "weights", "gradients", "states", "activations", "logits", "buffers", "other"
    }  # fmt: skip
    assert predicted.process_peak == predicted.total("ram")


def test_with_a_card_states_live_on_the_host() -> None:
    predicted = memory.predict(SHAPE, WORK, CARD)
    assert predicted.peaks["device"].keys() == {"weights", "gradients", "activations", "logits", "other"}
    assert predicted.peaks["host"].keys() == {"gradients", "states", "buffers", "other"}
    assert predicted.peaks["host"]["states"] == 12 * SHAPE.aligned_numel
    assert predicted.peaks["device"]["weights"] == 2 * SHAPE.numel + SHAPE.buffer_bytes(2)
    assert predicted.process_peak == predicted.total("host")


@pytest.mark.parametrize("machine", [PLAIN, CARD], ids=lambda machine: machine.name)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_tier_peaks_at_its_worst_moment(machine: Machine, activations: str) -> None:
    work = replace(WORK, activations=activations)
    predicted, moments = memory.predict(SHAPE, work, machine), memory.moments(SHAPE, work, machine)
    assert [moment.name for moment in moments] == ["loss", "backward", "end of backward", "update"]
    for tier, held in predicted.peaks.items():
        assert predicted.total(tier) == max(moment.total(tier) for moment in moments)
        assert predicted.total(tier) <= sum(held.values())


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_more_work_never_needs_less(data: st.DataObject) -> None:
    work = Workload(
        context=data.draw(st.integers(1, 200)),
        micro_batch=data.draw(st.integers(1, 4)),
        activations=data.draw(st.sampled_from(["keep", "recompute"])),
        bucket=2**16,
    )
    more = replace(work, **{data.draw(st.sampled_from(["context", "micro_batch"])): 400})
    shape = ModelShape.from_config(config_of(data.draw(st.sampled_from(["llama", "gemma2", "qwen3_moe"]))))
    for machine in (PLAIN, CARD):
        less, greater = memory.predict(shape, work, machine), memory.predict(shape, more, machine)
        assert all(less.total(tier) <= greater.total(tier) for tier in less.peaks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context must be at least 1, not 0"),
        ({"dtype": "fp8"}, "model.dtype 'fp8' .* bf16, fp32"),
    ],
)
def test_what_no_step_can_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(WORK, **changes)


def test_a_step_is_cut_into_other_micro_batches() -> None:
    cut = replace(WORK, documents=(24, 24)).with_micro_batch(1)
    assert (cut.micro_batch, cut.micro_batches, cut.rows, cut.documents) == (1, 6, 6, None)


@given(st.integers(1, 5000))
def test_divisors_by_trying_all(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


@given(st.integers(1, 5000))
def test_kernel_lengths_by_rounding_all(longest: int) -> None:
    assert kernel_lengths(longest) == len({round_length(length) for length in range(1, longest + 1)})
