"""Metrics of a run: one JSON object a step in RUN/metrics.jsonl; TensorBoard and W&B for who wants them."""

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.training.config import Report
from headrace.training.weights_and_biases import WeightsAndBiases

FILE = "metrics.jsonl"
"""The file's name in a run directory."""


_PACKAGES: dict[Report, str] = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""What a report needs; the extra of Headrace has the report's name."""


def check_reports(reports: Sequence[Report]) -> None:
    """Raise UserError if the package of a report is missing."""
    for report in reports:
        if importlib.util.find_spec(_PACKAGES[report]) is None:
            raise UserError(
                f"report: [{report}] needs a package that is missing: pip install headrace[{report}]"
            )


class Metrics:
    """Appends one record a step to ``RUN/metrics.jsonl`` and to the reports asked for.

    Each line is handed to the system as it is written, so a killed run loses at most a part of the last one.

    Args:
        directory: the run directory; made if missing.
        step: steps of the checkpoint that the run goes on from, 0 in a fresh run. Records of later steps were
            of a run that was killed after the checkpoint: they are removed, and written again.
        report: where metrics go besides the file.
        settings: of the run, for reports that show them.

    Raises:
        UserError: if a report's package is missing, or the file holds a line that is no record.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        report: Sequence[Report] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        check_reports(report)
        self.path = directory / FILE
        directory.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            os.truncate(self.path, _bytes_up_to(self.path, step))
        self._boards: list[_TensorBoard | WeightsAndBiases] = []
        if "tensorboard" in report:
            self._boards.append(_TensorBoard(directory / "tensorboard", step))
        if "wandb" in report:
            self._boards.append(WeightsAndBiases(directory, step, settings or {}, self._numbers()))
        self._file = self.path.open("ab")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``, which has a ``step``; JSON has no NaN or infinity, so these become null."""
        assert "step" in record, record
        kept = {name: _finite(value) for name, value in record.items()}
        line = json.dumps(kept, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        for board in self._boards:
            board.write(dict(_scalars(kept)))

    def _numbers(self) -> Iterator[dict[str, float]]:
        """What the file holds, as reports get it."""
        if self.path.exists():
            yield from (dict(_scalars(record)) for record, _ in _records(self.path))

    def close(self) -> None:
        """Close the file and the reports."""
        self._file.close()
        for board in self._boards:
            board.close()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file; a torn last line is left out.

    Raises UserError for any other line that is not a record.
    """
    return [record for record, _ in _records(path)]


def _bytes_up_to(path: Path, step: int) -> int:
    """Length of the file's part that holds the records up to ``step``."""
    kept = 0
    for record, end in _records(path):
        if record["step"] > step:
            break
        kept = end
    return kept


def _records(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each record and the file position behind it."""
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        end += len(line)
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}, line {number} is not a metrics record; remove the line") from None
        yield record, end


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            if name != "step":
                self._writer.add_scalar(name, value, scalars["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield prefix + name, value
