"""Predicts the ledger of a step from the model's config and the workload: every tier, before anything exists.

Three kinds of figures stand here. Exact by construction: weights, the optimizer's buffers, the bytes of both
links. Exact by derivation: activations and logits, held against measurement by tests. Estimates, each a named
constant with its source: what Python and its libraries hold, and what comes and goes inside an operation.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.ledger import PURPOSES, Ledger
from headrace.machine.machine import Machine
from headrace.planner.activations import SavedBytes
from headrace.planner.disk import disk_bytes, path_bytes, window_bytes
from headrace.planner.lora_activations import saved_bytes
from headrace.planner.shape import ModelShape
from headrace.planner.streamed import (
    buffer_bytes,
    home_bytes,
    journeys,
    kept_bytes,
    optimizer_layout,
    resident_numel,
    slot_bytes,
)
from headrace.planner.waiting import arriving_numel, passing_bytes, waiting_bytes, waiting_moves
from headrace.planner.workload import STATE, Workload, kernel_lengths, round_length
from headrace.schedule.action import Action, Kind

MIB = 2**20

KERNEL_SCRATCH = 2**15 * 4
"""Bytes of one worker's chunk of gradients in fp32 (optim.kernel.CHUNK elements)."""

NORM_SCRATCH = 2**16 * 8
"""Bytes of one worker's block of gradients in fp64 (optim.layout.BLOCK elements)."""

HEAD_ROWS = 16384
"""Rows of a bf16 head's gradient computed at a time (training.loss)."""

PROCESS_BASE = 430 * MIB
"""Resident bytes of Python with the libraries of a run, before a model is loaded. Measured on Linux with
Python 3.11, torch 2.13.0+cpu, transformers 5.24 and datasets 4: after
``import torch, transformers, datasets, typer, rich`` and one matrix product, /proc/self/status shows VmRSS
438,600 kB, which is 428 MiB."""

ALLOCATOR_SLACK = 64 * MIB
"""Resident bytes that the C allocator keeps beyond what is in use, in a process set up by memory.process:
freed pieces and thread arenas. In eight runs of 5 to 135 M parameters on two cores, VmHWM less all else
that is predicted lay between -17 and 131 MiB."""

ATTENTION_KERNEL = 4 * MIB
"""Bytes of machine code that torch 2.13 keeps on a CPU for attention in bf16 at one length. Resident bytes
were measured to grow by 60 MiB over 14 lengths that a model had not met before."""

PRODUCT_KERNELS = 10 * MIB
"""The same for the matrix products of a layer in bf16 at one number of tokens; measured 4 to 14 MiB."""

CUDA_DEVICE = 900 * MIB
"""Bytes of a card taken by the CUDA context, the libraries' workspaces and the caching allocator's rounding.
An assumption: no card was at hand to measure it."""

CUDA_HOST = 1000 * MIB
"""Resident bytes of the CUDA libraries beside :data:`PROCESS_BASE`. An assumption: no card was at hand."""


@dataclass(frozen=True)
class Moment:
    """A point of the step at which memory may peak: tier -> purpose -> bytes held then."""

    name: str
    held: Mapping[str, Mapping[str, int]]

    def total(self, tier: str) -> int:
        """Bytes held on ``tier``."""
        return sum(self.held.get(tier, {}).values())


def predict(shape: ModelShape, work: Workload, machine: Machine) -> Ledger:
    """The ledger of one step: peaks by tier and purpose, of tiers, of the process, and bytes by link.

    A tier's peak is that of its worst :func:`moments`, so it may be less than the sum over its purposes.
    """
    ledger = Ledger(steps=1)
    for moment in moments(shape, work, machine):
        for tier, held in moment.held.items():
            ledger.hold_total(tier, moment.total(tier))
            for purpose in PURPOSES:
                if held.get(purpose):
                    ledger.hold(tier, purpose, held[purpose])
    ledger.hold(machine.device_tier, "activations", saved_bytes(shape, work, machine).peak)
    ledger.process_peak = ledger.total(machine.host_tier)
    for action, nbytes in link_bytes(shape, work, machine).items():
        ledger.book(action, 0.0, nbytes)
    return ledger


def moments(shape: ModelShape, work: Workload, machine: Machine) -> list[Moment]:
    """When memory may peak: in the loss, at some layer of backward, as backward ends, and in the update."""
    saved = saved_bytes(shape, work, machine)
    added = {
        "loss": {
            "activations": saved.after_forward,
            "logits": loss_bytes(shape, work),
            "other": work.tokens * shape.hidden * work.element,  # the head's input
        },
        "backward": _backward(shape, work, saved),
        "end of backward": {
            "gradients": _last_gradients(shape, work),
            "logits": _waiting(shape, work),
            "other": transient_bytes(shape, work),
        },
        "update": {},
    }
    return [Moment(name, _place(shape, work, machine, held)) for name, held in added.items()]


def _last_gradients(shape: ModelShape, work: Workload) -> int:
    """The largest parameter's gradient, with buckets that fill or leave beside it.

    Buckets of streamed weights are no larger than a layer and leave with it, before the embedding's comes.
    """
    arriving = arriving_numel(shape, work)
    streamed = work.weights != "device" and shape.adapters is None
    together = shape.largest + arriving
    if streamed:
        together = max(shape.largest + resident_numel(shape, work), arriving)
    return min(shape.trained_numel, together) * work.element


def _backward(shape: ModelShape, work: Workload, saved: SavedBytes) -> dict[str, int]:
    """The worst layer: as backward goes down, activations go and gradients fill buckets."""
    apart = shape.vocab * shape.hidden if shape.adapters is None else 0  # the embedding's come last
    layer = (shape.trained_numel - apart) // shape.layers * work.element
    activations = saved.in_backward
    full = min(shape.trained_numel, arriving_numel(shape, work)) * work.element
    gradients = [min(full, layer * (shape.layers - index)) for index in range(shape.layers)]
    worst = max(range(shape.layers), key=lambda index: activations[index] + gradients[index])
    return {
        "activations": activations[worst],
        "gradients": gradients[worst],
        "logits": _waiting(shape, work),
        "other": transient_bytes(shape, work),
    }


def _waiting(shape: ModelShape, work: Workload) -> int:
    """The gradient of a tied head, which waits for the embedding's until backward ends."""
    waits = shape.tied and shape.adapters is None
    return shape.vocab * shape.hidden * work.element if waits else 0


def _place(
    shape: ModelShape, work: Workload, machine: Machine, passing: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """What a moment adds on the device, together with what is always there."""
    base = PROCESS_BASE + ALLOCATOR_SLACK + (kernel_bytes(work) if machine.unified else CUDA_HOST)
    always = [
        (machine.device_tier, {"weights": weight_bytes(shape, work)}),
        (machine.device_tier, {} if machine.unified else {"other": CUDA_DEVICE}),
        (machine.host_tier, pool_bytes(shape, work, machine)),
        (machine.host_tier, {"other": base}),
        ("disk", {"states": disk_bytes(shape, work)} if work.states == "disk" else {}),
        ("disk", {"gradients": waiting_bytes(shape, work)} if work.gradients == "disk" else {}),
        *((tier, {"buffers": n}) for tier, n in buffer_bytes(shape, work, machine).items()),
        *((tier, {"activations": n}) for tier, n in kept_bytes(shape, work).items()),
    ]
    if work.weights != "device":
        home = machine.host_tier if work.weights == "host" else "disk"
        always.append((home, {"weights": home_bytes(shape, work)}))
    held: dict[str, dict[str, int]] = {}
    for tier, purposes in [*always, (machine.device_tier, passing)]:
        for purpose, nbytes in purposes.items():
            on_tier = held.setdefault(tier, {})
            on_tier[purpose] = on_tier.get(purpose, 0) + nbytes
    return held


def weight_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of the device's working weights, adapters among them, and the module's buffers."""
    adapters = shape.trained_numel if shape.adapters else 0
    slots = 0 if work.weights == "device" else slot_bytes(shape, work)
    own = (resident_numel(shape, work) + adapters) * work.element
    return own + slots + shape.buffer_bytes(work.element)


def pool_bytes(shape: ModelShape, work: Workload, machine: Machine) -> dict[str, int]:
    """Bytes by purpose that the optimizer takes from the host pool; exact."""
    summed = work.micro_batches > 1
    numel = optimizer_layout(shape, work).size
    bucket = min(work.bucket, numel) * work.element
    landing = bucket if summed and not machine.unified else 0  # gradients land before they are summed
    staging = work.staging * bucket if summed and work.element < 4 else 0  # else in place of the gradients
    scratch = work.workers * (KERNEL_SCRATCH + NORM_SCRATCH)
    return {
        "states": window_bytes(shape, work) if work.states == "disk" else STATE * numel,
        "gradients": waiting_bytes(shape, work) if work.gradients == "host" else 0,
        "buffers": staging + landing + passing_bytes(shape, work) + scratch,
    }


def link_bytes(shape: ModelShape, work: Workload, machine: Machine) -> dict[Action, int]:
    """Bytes of one step by kind of action and path, summed over buckets and micro-batches; exact."""
    down = shape.trained_numel * work.element * work.micro_batches
    back = shape.trained_numel if shape.adapters else resident_numel(shape, work)
    links = Counter({Action(Kind.DOWN): down, Action(Kind.UP): back * work.element})
    if work.states == "disk":
        links.update(path_bytes(shape, work))
    for action, nbytes in waiting_moves(shape, work).items():
        links[action] += nbytes * work.micro_batches
    for action, nbytes in journeys(shape, work, machine):
        links[action] += nbytes
    return dict(links)


def loss_bytes(shape: ModelShape, work: Workload) -> int:
    """Highest bytes that the chunked loss allocates, the gradients it hands on included (training.loss)."""
    if work.embeddings == "rows":
        return _row_loss_bytes(shape, work)
    element, rows = work.element, min(work.loss_chunk, work.tokens)
    head = shape.vocab * shape.hidden
    several = work.tokens > work.loss_chunk
    narrow = element < 4
    capped = 2 if shape.logit_cap else 1
    logits = (
        rows * shape.vocab * (4 * capped + (element if narrow else 0)) + 2 * rows * shape.hidden * element
    )
    product = min(HEAD_ROWS, shape.vocab) * shape.hidden * element if several and narrow else 0
    rounding = head * element if several and narrow else 0
    if shape.adapters is not None:  # the head is frozen
        return work.tokens * shape.hidden * element + logits
    sums = head * (4 if several else element)
    return work.tokens * shape.hidden * element + sums + max(logits + product, rounding)


def _row_loss_bytes(shape: ModelShape, work: Workload) -> int:
    """The same where the head comes by rows (training.row_loss): its gradient is whole, logits are not."""
    element, tokens = work.element, work.tokens
    held = min(work.bucket // shape.hidden + 1, shape.vocab)
    rows = min(held, max(1, work.loss_chunk * shape.vocab // tokens))
    logits = tokens * rows * (4 * (2 if shape.logit_cap else 1) + (element if element < 4 else 0))
    states = tokens * shape.hidden * (2 * element + 4)  # inputs, their gradient in fp32, and a product
    weight = shape.vocab * shape.hidden * element if shape.adapters is None else 0
    return states + weight + logits


def kernel_bytes(work: Workload) -> int:
    """Bytes of machine code that a CPU's 16-bit kernels grow to; other dtypes are not compiled by shape."""
    if work.element == 4:
        return 0
    documents = work.documents
    lengths = kernel_lengths(work.context) if documents is None else len(set(map(round_length, documents)))
    return lengths * ATTENTION_KERNEL + PRODUCT_KERNELS


def transient_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes that backward allocates and frees within one layer: gradients of what stands between matrices."""
    wide = max(shape.intermediate, shape.heads * shape.head_dim)
    return work.tokens * (3 * wide * work.element + 3 * shape.hidden * 4)
