import subprocess
import sys

import pytest
from pydantic import ValidationError

from headrace.data.config import DataConfig, resolve_loss


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (0.01, 0.01),
        ("0.25", 0.25),
        ("1e-3", 1e-3),
        ("dev.jsonl", "dev.jsonl"),
        (["a.txt"], ["a.txt"]),
        (None, None),
    ],
)
def test_eval_is_a_share_or_paths(given, read):
    assert DataConfig(train="a.txt", eval=given).eval == read


@pytest.mark.parametrize("given", [0, 1, 1.0, -0.5, "2", True, "nan"])
def test_eval_outside_the_open_unit_interval_is_refused(given):
    with pytest.raises(ValidationError, match="neither a share between 0 and 1 nor a path"):
        DataConfig(train="a.txt", eval=given)


def test_loss_that_has_no_meaning_for_the_format_is_refused_with_both_keys():
    with pytest.raises(ValidationError, match=r"data\.loss_on=assistant .* data\.format=text; it can be all"):
        DataConfig(train="a.txt", format="text", loss_on="assistant")
    with pytest.raises(ValueError, match="it can be completion or all"):
        resolve_loss("completion", "assistant")


def test_auto_loss_follows_the_format():
    assert [resolve_loss(f, "auto") for f in ("text", "completion", "messages")] == [
        "all",
        "completion",
        "assistant",
    ]


def test_empty_list_is_refused():
    with pytest.raises(ValidationError, match="at least one file"):
        DataConfig(train=[])


def test_config_and_estimate_import_no_torch():
    code = "import sys, headrace.data.config, headrace.data.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
