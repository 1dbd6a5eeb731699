"""OffloadedAdamW inside Hugging Face's Trainer: what must fit together, and the true gradient norm."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback as HfTrainerCallback
from transformers import TrainerControl, TrainerState, TrainingArguments

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW

if TYPE_CHECKING:  # it takes seconds
    from transformers import Trainer


class TrainerCallback(HfTrainerCallback):
    """Checks that Trainer's settings fit the optimizer's and logs what the optimizer knows.

    Trainer clips what it finds in ``.grad``; gradients that were released are not there any more, and it
    would silently clip nothing. The same goes for averaging over processes and for the loss scaling of fp16.

    Args:
        optimizer: the one given to ``Trainer(optimizers=(optimizer, None))``; by default the one that Trainer
            built, from ``optimizer_cls_and_kwargs=(OffloadedAdamW, {...})``.
    """

    def __init__(self, optimizer: OffloadedAdamW | None = None) -> None:
        self._optimizer = optimizer
        self._is_first = False

    def put_first(self, trainer: "Trainer") -> None:
        """Become the first of the trainer's callbacks, so that TensorBoard, W&B and others get the true norm.

        Trainer puts those before the ones of ``Trainer(callbacks=[...])``, and each has the logs as the
        callbacks before it left them. Call it before ``trainer.train()``.
        """
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        self._is_first = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise UserError for settings that would do nothing or go wrong, and for a state that was lost."""
        found = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it
        if not isinstance(found, OffloadedAdamW) or self._optimizer not in (None, found):
            raise UserError(
                f"Trainer trains with {_described(found)}, TrainerCallback belongs to "
                f"{_described(self._optimizer)}: pass Trainer(optimizers=(optimizer, None)) and "
                "TrainerCallback(optimizer) the same OffloadedAdamW"
            )
        self._optimizer = optimizer = found
        refusal = next(
            _released(args, optimizer) if optimizer.release_gradients else _kept(args, optimizer), ""
        )
        if refusal:
            raise UserError(refusal)
        if state.global_step and not any(optimizer.counts.values()):
            raise UserError(
                f"Trainer goes on at step {state.global_step}, but the checkpoint brought no state of the "
                "optimizer: resume from one that was saved with save_only_model=False, or train its model "
                "anew without resume_from_checkpoint"
            )
        if optimizer.release_gradients and args.report_to and not self._is_first:
            warnings.warn(
                f"{', '.join(args.report_to)} will show a gradient norm of 0, which is what Trainer finds of "
                "released gradients: call put_first(trainer) of this TrainerCallback before train()",
                stacklevel=2,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the number of skipped steps and, of released gradients, the global norm into Trainer's logs.

        Into its history, and into what callbacks after this one get: see :meth:`put_first`.
        """
        if logs is None or "loss" not in logs or self._optimizer is None:
            return
        known: dict[str, float] = {"skipped_steps": self._optimizer.skipped}
        if self._optimizer.release_gradients:
            known["grad_norm"] = self._optimizer.norm.value
        logs.update(known)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(known)  # Trainer copied the logs before it called us


def _released(args: TrainingArguments, optimizer: OffloadedAdamW) -> Iterator[str]:
    """Why these settings cannot go with gradients that are released."""
    if args.max_grad_norm:
        yield (
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) would clip nothing, since released "
            "gradients have left .grad: set it to 0 and pass max_grad_norm to OffloadedAdamW"
        )
    if args.gradient_accumulation_steps != optimizer.micro_batches:
        yield (
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}) and "
            f"OffloadedAdamW(micro_batches={optimizer.micro_batches}) differ: set both to the same number"
        )
    if args.world_size > 1:
        yield (
            f"each of the {args.world_size} processes would train on its own gradients, since released "
            "ones leave before they are averaged: build OffloadedAdamW with release_gradients=False"
        )
    if args.fp16:
        yield (
            "TrainingArguments(fp16=True) scales the loss and looks for overflow in .grad, which "
            "released gradients have left: train in bf16, or build OffloadedAdamW with "
            "release_gradients=False"
        )


def _kept(args: TrainingArguments, optimizer: OffloadedAdamW) -> Iterator[str]:
    """Why these settings cannot go with gradients that stay in place."""
    if args.max_grad_norm and optimizer.max_grad_norm:
        yield (
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) and "
            f"OffloadedAdamW(max_grad_norm={optimizer.max_grad_norm}) would both clip: set one of them to 0"
        )


def _described(optimizer: Any) -> str:
    return "no optimizer yet" if optimizer is None else f"{type(optimizer).__name__} at {id(optimizer):#x}"
