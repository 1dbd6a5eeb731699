"""Metrics to Weights & Biases, from a thread of its own: training never waits for it, nor fails with it."""

import os
import queue
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from headrace.memory.durable import replace_text

PROJECT = "headrace"
"""Project of runs for which WANDB_PROJECT names none."""

Scalars = Mapping[str, float]
"""A step's numbers by name, ``step`` among them."""

Mode = Literal["offline"] | None
"""None leaves it to WANDB_MODE and W&B's own default, which is online."""

_INIT_SECONDS = 20  # after which a run that finds no server is kept on the disk
_FINISH_SECONDS = 60  # after which the rest stays on the disk
_SENT_SECONDS = 60  # after which a step that W&B took is with it: it writes and sends every 15 seconds


class WeightsAndBiases:
    """One run of W&B for one run directory, over all its sessions; its files lie in ``RUN/wandb``.

    Without a key, or where no server answers, W&B keeps the run there for ``wandb sync``. WANDB_MODE,
    WANDB_PROJECT and W&B's other variables are followed. The charts' x axis is the optimizer's step: W&B
    cannot take back what a killed session sent after its checkpoint, so these steps come twice, with the
    same values; so do the last ones before it, of which a kill leaves open whether they were sent.

    Args:
        directory: the run directory.
        step: steps of the checkpoint that the run goes on from; 0 begins another run of W&B.
        settings: shown as the run's config.
        earlier: the numbers of the steps that the run goes on from.
    """

    def __init__(
        self, directory: Path, step: int, settings: Mapping[str, Any], earlier: Iterable[Scalars] = ()
    ) -> None:
        self._directory = directory
        self._settings = dict(settings)
        self._id = _run_id(directory / "wandb" / "run-id", step)
        self._sent = _Sent(directory / "wandb" / "sent", step)
        self._records: queue.SimpleQueue[Scalars | None] = queue.SimpleQueue()
        for scalars in earlier:
            if scalars["step"] > self._sent.step:
                self._records.put(scalars)
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="headrace-wandb", daemon=True)
        self._thread.start()

    def write(self, scalars: Scalars) -> None:
        """Hand over a step's numbers; returns at once."""
        if self._thread.is_alive():
            self._records.put(scalars)
        self._tell()

    def close(self) -> None:
        """Let W&B take what is left, for a minute at most."""
        self._records.put(None)
        self._thread.join(_INIT_SECONDS + _FINISH_SECONDS)
        if self._thread.is_alive():
            self._notices.put(f"has not taken everything yet: afterwards, {self._sync('run-*')}")
        self._tell()

    def _tell(self) -> None:
        """Say what happened in the thread: warnings belong to the one that trains."""
        while not self._notices.empty():
            warnings.warn(f"W&B {self._notices.get()}", stacklevel=3)

    def _sync(self, pattern: str) -> str:
        return f"wandb sync {self._directory / 'wandb' / pattern}"

    def _serve(self) -> None:
        try:
            run = self._open()
            while (scalars := self._records.get()) is not None:
                run.log(dict(scalars))
                self._sent.took(int(scalars["step"]))
            run.finish()
            self._sent.has_all()
        except Exception as error:  # whatever it is, the run is worth more than its report
            self._notices.put(f"failed ({_first_line(error)}); what it has: {self._sync('*run-*')}")

    def _open(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal belongs to the run's own progress
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports on itself wait at exit
        import wandb

        mode: Mode = None
        if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
            kept = f"this run stays on the disk for {self._sync('offline-run-*')}"
            self._notices.put(f"has no key here (wandb login): {kept}")
            mode = "offline"
        try:
            run = self._init(mode)
        except wandb.errors.CommError as error:
            kept = f"this run stays on the disk for {self._sync('offline-run-*')}"
            self._notices.put(f"does not answer ({_first_line(error)}): {kept}")
            wandb.teardown()  # it still holds the run's id
            run = self._init("offline")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _init(self, mode: Mode) -> Any:
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self._directory.name),
            id=self._id,
            resume="allow",
            dir=str(self._directory),
            mode=mode,
            config=self._settings,
            settings=wandb.Settings(
                console="off",
                init_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
        )


class _Sent:
    """The last step that W&B has for certain, in a file: what it took shortly before a kill may be lost."""

    def __init__(self, file: Path, start: int) -> None:
        self._file = file
        self._last = start
        self._waiting: tuple[float, int] | None = None  # when a step was taken, and which
        known = int(file.read_text(encoding="utf-8")) if start and file.exists() else 0
        self._note(min(start, known))

    def took(self, step: int) -> None:
        """W&B took a step: it will be on the disk, or sent, a while later."""
        now, self._last = time.monotonic(), step
        if self._waiting is None:
            self._waiting = now, step
        elif now - self._waiting[0] > _SENT_SECONDS:
            self._note(self._waiting[1])
            self._waiting = now, step

    def has_all(self) -> None:
        """W&B has ended the run's session, and so has all that it took."""
        self._note(self._last)

    def _note(self, step: int) -> None:
        self.step = step
        replace_text(self._file, str(step))


def _run_id(file: Path, step: int) -> str:
    """The id that the first session chose."""
    if step and file.exists():
        return file.read_text(encoding="utf-8").strip()
    name = uuid.uuid4().hex[:8]
    replace_text(file, name)
    return name


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
