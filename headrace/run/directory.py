"""Where things are in a run's directory."""

from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UserError


class RunDirectory:
    """``RUN/``: plan.yaml, metrics.jsonl, ledger.json, trace.json, checkpoint-STEP/, data/, model/."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.plan = self.path / "plan.yaml"
        self.ledger = self.path / "ledger.json"
        self.metrics = self.path / "metrics.jsonl"
        self.trace = self.path / "trace.json"
        self.data = self.path / "data"
        self.model = self.path / "model"

    def read_plan(self) -> dict[str, Any]:
        """The plan that the run was started with, as plain data.

        Raises UserError when the directory holds no run.
        """
        try:
            tree = yaml.safe_load(self.plan.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{self.path} holds no run: plan.yaml is missing; give the `out` of a run file"
            ) from None
        except NotADirectoryError:
            raise UserError(
                f"{self.path} is a file, not the directory of a run: give the `out` of a run file"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.plan} cannot be read ({error.strerror}): give the `out` of a run"
            ) from None
        except (yaml.YAMLError, ValueError, RecursionError):
            tree = None
        if not isinstance(tree, dict) or "model" not in tree:
            raise UserError(f"{self.plan} is damaged: bring a copy back, or start again in another out")
        return tree
