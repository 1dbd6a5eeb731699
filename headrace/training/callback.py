"""OffloadedAdamW inside Hugging Face's Trainer: what must fit together, and the true gradient norm."""

from typing import Any

from transformers import TrainerCallback as HfTrainerCallback
from transformers import TrainerControl, TrainerState, TrainingArguments

from headrace.errors import UserError
from headrace.optim.offloaded import OffloadedAdamW


class TrainerCallback(HfTrainerCallback):
    """Checks that Trainer's settings fit the optimizer's and logs what the optimizer knows.

    Trainer clips what it finds in ``.grad``; gradients that were released are not there any more, and it
    would silently clip nothing.

    Args:
        optimizer: the one given to ``Trainer(optimizers=(optimizer, None))``.
    """

    def __init__(self, optimizer: OffloadedAdamW) -> None:
        self._optimizer = optimizer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise UserError for settings that would do nothing or go wrong."""
        optimizer = self._optimizer
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
        if logs is None or "loss" not in logs:
            return
        known: dict[str, float] = {"skipped_steps": self._optimizer.skipped}
        if self._optimizer.release_gradients:
            known["grad_norm"] = self._optimizer.norm.value
        logs.update(known)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(known)  # Trainer copied the logs before it called us
