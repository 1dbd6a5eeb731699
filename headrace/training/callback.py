"""OffloadedAdamW inside Hugging Face's Trainer: what must fit together, and the true gradient norm."""

from typing import Any

from transformers import TrainerCallback as HfTrainerCallback
from transformers import TrainerControl, TrainerState, TrainingArguments

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW


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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise UserError for settings that would do nothing or go wrong."""
        found = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it
        if not isinstance(found, OffloadedAdamW) or self._optimizer not in (None, found):
            raise UserError(
                f"Trainer trains with {_described(found)}, TrainerCallback belongs to "
                f"{_described(self._optimizer)}: pass Trainer(optimizers=(optimizer, None)) and "
                "TrainerCallback(optimizer) the same OffloadedAdamW"
            )
        self._optimizer = optimizer = found
        if not optimizer.release_gradients:
            return
        if args.max_grad_norm:
            raise UserError(
                f"TrainingArguments(max_grad_norm={args.max_grad_norm}) would clip nothing, since released "
                "gradients have left .grad: set it to 0 and pass max_grad_norm to OffloadedAdamW"
            )
        if args.gradient_accumulation_steps != optimizer.micro_batches:
            raise UserError(
                f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}) and "
                f"OffloadedAdamW(micro_batches={optimizer.micro_batches}) differ: set both to the same number"
            )
        if args.world_size > 1:
            raise UserError(
                f"each of the {args.world_size} processes would train on its own gradients, since released "
                "ones leave before they are averaged: build OffloadedAdamW with release_gradients=False"
            )
        if args.fp16:
            raise UserError(
                "TrainingArguments(fp16=True) scales the loss and looks for overflow in .grad, which "
                "released gradients have left: train in bf16, or build OffloadedAdamW with "
                "release_gradients=False"
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

        Into its history, and into what it shows. Callbacks that were called before this one, such as
        TensorBoard's, have had Trainer's own norm, which is 0 for released gradients; for others it is true.
        """
        if logs is None or "loss" not in logs or self._optimizer is None:
            return
        known: dict[str, float] = {"skipped_steps": self._optimizer.skipped}
        if self._optimizer.release_gradients:
            known["grad_norm"] = self._optimizer.norm.value
        logs.update(known)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(known)  # Trainer copied the logs before it called us


def _described(optimizer: Any) -> str:
    return "no optimizer yet" if optimizer is None else f"{type(optimizer).__name__} at {id(optimizer):#x}"
