"""The training loop of one process: micro-batches, the optimizer's step, evaluation.

It is a generator: it yields after every optimizer step, at which nothing is in flight, and whoever iterates
writes metrics, shows progress and saves checkpoints there.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from headrace.data.batch import MicroBatch
from headrace.data.loader import Loader
from headrace.errors import RunStopped
from headrace.memory.process import peak_resident_bytes
from headrace.models.finite import not_finite
from headrace.models.published import Pieces
from headrace.optim.config import OptimConfig
from headrace.optim.offloaded import OffloadedAdamW
from headrace.schedule.action import Action, Kind
from headrace.training import row_loss
from headrace.training.config import TrainConfig
from headrace.training.forward import forward_loss
from headrace.training.lr import learning_rate
from headrace.training.meters import Meters
from headrace.training.progress import StepReport

MEASURED = 3
"""Steps of a session in which activations and logits are measured; watching them costs a little time."""


class Loop:
    """Trains a model with an offloaded optimizer over a loader's steps.

    Args:
        model: in training mode, its head checked.
        optimizer: releases gradients; its param groups share one learning rate.
        data: the steps.
        held_out: what evaluations run over, or None.
        steps: optimizer steps of the whole run, which shape the learning rate.
        train: settings of the loop.
        optim: settings of the learning rate.
        meters: measure what autograd and the loss hold, in the first steps of a session.
        elsewhere: gives those weights that the model does not hold itself.
        rows: gives the output embedding's rows where they come in pieces.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OffloadedAdamW,
        data: Loader,
        held_out: Loader | None,
        *,
        steps: int,
        train: TrainConfig,
        optim: OptimConfig,
        meters: Meters,
        elsewhere: Pieces | None = None,
        rows: row_loss.Pieces | None = None,
    ) -> None:
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._model = model
        self._optimizer = optimizer
        self._data = data
        self._held_out = held_out
        self._steps = steps
        self._train = train
        self._optim = optim
        self._meters = meters
        self._elsewhere = elsewhere
        self._rows = rows
        self._ledger = optimizer.ledger
        self._measured = 0

    def run(self, start: int) -> Iterator[StepReport]:
        """Take steps ``start``, ``start + 1``... until all are done, yielding after each.

        Raises:
            RunStopped: after ``train.max_skipped`` steps in a row with a gradient that is not finite.
        """
        for index in range(start, self._steps):
            yield self._step(index)
            if self.skipped_in_a_row >= self._train.max_skipped:
                raise RunStopped(
                    f"{self.skipped_in_a_row} steps in a row had a gradient that is not finite, the last in "
                    f"{self._optimizer.norm.offender}: lower optim.lr, look at the data, or raise "
                    "train.max_skipped"
                )
        self._refuse_a_failed_training()

    def _refuse_a_failed_training(self) -> None:
        """A run that trained nothing, or ends with weights that are not finite, is no success."""
        cure = "lower optim.lr, look at the model's weights and the data, and start again in another out"
        if self.skipped >= self._steps:
            raise RunStopped(
                f"every step was skipped for a gradient that is not finite, so nothing was trained: {cure}"
            )
        if self.skipped_in_a_row and (name := not_finite(self._model, self._elsewhere)):
            raise RunStopped(f"the last step was skipped and {name} is not finite: {cure}")

    def evaluate(self) -> float | None:
        """Mean loss over the held-out trained tokens; None where nothing is held out."""
        if self._held_out is None:
            return None
        self._model.eval()
        scale, chunk = 1.0 / max(1, self._held_out.trained_tokens), self._train.loss_chunk
        with torch.no_grad(), self._optimizer.lanes.unbooked():
            batches = self._held_out.in_order()
            losses = [
                forward_loss(self._model, batch, scale, chunk, rows=self._rows).double() for batch in batches
            ]
        self._model.train()
        return float(sum(losses))

    def _step(self, index: int) -> StepReport:
        begin, stalled = time.perf_counter(), sum(self._ledger.stalls.values())
        batches = self._data.step(index)
        trained = sum(batch.valid_tokens for batch in batches)
        lr = learning_rate(index, self._steps, self._optim)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = self._accumulate(batches, 1.0 / max(1, trained))
        self._optimizer.step()
        self._count_skips()
        seconds = time.perf_counter() - begin
        self._ledger.seconds += seconds
        return StepReport(
            number=index + 1,
            loss=loss,
            eval_loss=self.evaluate() if self._evaluates_after(index) else None,
            lr=lr,
            norm=self._optimizer.norm.value,
            offender=self._optimizer.norm.offender,
            skipped=self.skipped,
            tokens=sum(stop - start for batch in batches for _, start, stop in batch.documents),
            trained=trained,
            seconds=seconds,
            stall=sum(self._ledger.stalls.values()) - stalled,
            held=self._held(),
        )

    def _accumulate(self, batches: list[MicroBatch], scale: float) -> float:
        """Forward and backward of every micro-batch; the sum of their shares of the loss."""
        losses, lanes, meters = [], self._optimizer.lanes, self._meters
        measured = self._measured < MEASURED
        self._measured += measured
        for number, batch in enumerate(batches):
            with meters.activations if measured else nullcontext():
                with lanes.compute(Action(Kind.FORWARD, microbatch=number)):
                    logits = meters.logits if measured else nullcontext()
                    loss = forward_loss(self._model, batch, scale, self._train.loss_chunk, logits, self._rows)
                with lanes.compute(Action(Kind.BACKWARD, microbatch=number)):
                    loss.backward()
            losses.append(loss.detach().double())
            del loss  # and its graph, before the next forward
        tier = self._optimizer.device.tier
        self._ledger.hold(tier, "activations", meters.activations.peak)
        self._ledger.hold(tier, "logits", meters.logits.peak)
        return float(sum(losses))

    def _held(self) -> dict[str, int]:
        held = {self._optimizer.host.tier: peak_resident_bytes()}
        if self._optimizer.device is not self._optimizer.host:
            held[self._optimizer.device.tier] = torch.cuda.max_memory_allocated()
        return held

    def _count_skips(self) -> None:
        finite = math.isfinite(self._optimizer.norm.value)
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1

    def _evaluates_after(self, index: int) -> bool:
        every = self._train.eval_every
        return self._held_out is not None and (
            (every and (index + 1) % every == 0) or index + 1 == self._steps
        )
