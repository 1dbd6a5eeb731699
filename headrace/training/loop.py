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
from headrace.errors import UserError
from headrace.optim.config import OptimConfig
from headrace.optim.offloaded import OffloadedAdamW
from headrace.schedule.action import Action, Kind
from headrace.training.activations import ActivationMeter
from headrace.training.config import TrainConfig
from headrace.training.forward import forward_loss
from headrace.training.loss import loss_bytes
from headrace.training.lr import learning_rate
from headrace.training.progress import StepReport


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
        meter: measures activations while it is entered.
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
        meter: ActivationMeter,
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
        self._meter = meter
        self._ledger = optimizer.ledger
        self._logits = _logits_bytes(model, train)

    def run(self, start: int) -> Iterator[StepReport]:
        """Take steps ``start``, ``start + 1``... until all are done, yielding after each.

        Raises:
            UserError: after ``train.max_skipped`` steps in a row with a gradient that is not finite.
        """
        for index in range(start, self._steps):
            yield self._step(index)
            if self.skipped_in_a_row >= self._train.max_skipped:
                raise UserError(
                    f"{self.skipped_in_a_row} steps in a row had a gradient that is not finite, the last in "
                    f"{self._optimizer.norm.offender}: lower optim.lr, look at the data, or raise "
                    "train.max_skipped"
                )

    def evaluate(self) -> float | None:
        """Mean loss over the held-out trained tokens; None where nothing is held out."""
        if self._held_out is None:
            return None
        self._model.eval()
        batches = [
            batch for step in range(self._held_out.steps_per_epoch) for batch in self._held_out.step(step)
        ]
        scale = 1.0 / max(1, sum(batch.valid_tokens for batch in batches))
        with torch.no_grad():
            losses = [forward_loss(self._model, b, scale, self._train.loss_chunk).double() for b in batches]
        self._model.train()
        return float(sum(losses))

    def _step(self, index: int) -> StepReport:
        begin, stalled = time.perf_counter(), sum(self._ledger.stalls.values())
        batches = self._data.step(index)
        trained = sum(batch.valid_tokens for batch in batches)
        lr = learning_rate(index, self._steps, self._optim)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        loss = self._accumulate(batches, 1.0 / max(1, trained), measured=index % self._train.eval_every == 0)
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
        )

    def _accumulate(self, batches: list[MicroBatch], scale: float, measured: bool) -> float:
        """Forward and backward of every micro-batch; the sum of their shares of the loss."""
        losses, lanes = [], self._optimizer.lanes
        for number, batch in enumerate(batches):
            with self._meter if measured else nullcontext():
                with lanes.compute(Action(Kind.FORWARD, microbatch=number)):
                    loss = forward_loss(self._model, batch, scale, self._train.loss_chunk)
                with lanes.compute(Action(Kind.BACKWARD, microbatch=number)):
                    loss.backward()
            losses.append(loss.detach().double())
            del loss  # and its graph, before the next forward
        tier = self._optimizer.device.tier
        self._ledger.hold(tier, "activations", self._meter.peak)
        self._ledger.hold(tier, "logits", self._logits)
        return float(sum(losses))

    def _count_skips(self) -> None:
        finite = math.isfinite(self._optimizer.norm.value)
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1

    def _evaluates_after(self, index: int) -> bool:
        every = self._train.eval_every
        return self._held_out is not None and (
            (every and (index + 1) % every == 0) or index + 1 == self._steps
        )
