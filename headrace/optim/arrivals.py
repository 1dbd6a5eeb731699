"""Takes gradients as they become complete: one by one while backward runs, or all that stand in ``.grad``."""

from collections.abc import Mapping

from torch import Tensor

from headrace.errors import UserError
from headrace.optim.checks import dense
from headrace.optim.engine import Engine


class Arrivals:
    """Hands the gradients of parameters to the engine and counts the backward passes of a step.

    Args:
        named: the trained parameters, in the order of the engine's layout.
        engine: takes the gradients.
        micro_batches: backward passes that a step may have.
        released: whether gradients leave as they become complete.
    """

    def __init__(
        self, named: Mapping[str, Tensor], engine: Engine, micro_batches: int, *, released: bool
    ) -> None:
        self._named = list(named.items())
        self._engine = engine
        self._micro_batches = micro_batches
        self._released = released
        self._backwards = [0] * len(named)

    @property
    def none(self) -> bool:
        """Whether no gradient has arrived in this step."""
        return not any(self._backwards)

    def release(self, index: int) -> None:
        """A gradient is complete: hand it on, and free it once it has left the device.

        Raises UserError for more backward passes than were announced.
        """
        name, parameter = self._named[index]
        self._backwards[index] += 1
        if self._backwards[index] > self._micro_batches:
            raise UserError(
                f"backward ran {self._backwards[index]} times before step() for {name}, but micro_batches is "
                f"{self._micro_batches}: pass OffloadedAdamW(micro_batches={self._backwards[index]}) or more"
            )
        gradient = dense(name, parameter)
        parameter.grad = None
        self._engine.arrive(index, gradient)

    def collect(self) -> None:
        """Take what stands in ``.grad``; released gradients do not, unless they were set by hand.

        Raises UserError for those that were set beside released ones.
        """
        for index, (name, parameter) in enumerate(self._named):
            if parameter.grad is None:
                continue
            if self._released and not self._backwards[index]:
                self.release(index)
            elif not self._released:
                self._backwards[index] += 1
                self._engine.arrive(index, dense(name, parameter))
            else:
                raise UserError(
                    f"{name}.grad was set after backward() had released the gradient: to change gradients "
                    "before step(), build OffloadedAdamW with release_gradients=False"
                )

    def clear(self) -> None:
        """Begin the next step."""
        self._backwards = [0] * len(self._named)
