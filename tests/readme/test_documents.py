"""README and docs are true: their commands run, their run files are valid, their links lead somewhere.

Every ```bash and ```python block is run, in order, in one directory for each document; a comment line
`<!-- not run: reason -->` above a block leaves it out. Every ```yaml block is a run file.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from headrace.run.file import validate

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
REASON = r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?"
BLOCK = re.compile(f"^{REASON}```(?P<language>\\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)(?P<target>[^)#]+)")
INTERPRETERS = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    language: str
    code: str
    reason: str | None

    @property
    def runs(self) -> bool:
        return self.language in INTERPRETERS and not self.reason


def blocks(path: Path) -> list[Block]:
    found = BLOCK.finditer(path.read_text(encoding="utf-8"))
    return [Block(path.name, match["language"], match["code"], match["reason"]) for match in found]


BLOCKS = {path: blocks(path) for path in DOCUMENTS}
RUNNABLE = [path for path in DOCUMENTS if any(block.runs for block in BLOCKS[path])]


def title(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", RUNNABLE, ids=title)
def test_commands_run(path, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    for block in filter(lambda block: block.runs, BLOCKS[path]):
        command = [*INTERPRETERS[block.language], block.code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "block", [b for path in DOCUMENTS for b in BLOCKS[path] if b.language == "yaml"], ids=lambda b: b.document
)
def test_run_files_are_valid(block):
    assert validate(yaml.safe_load(block.code), block.document)


@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_every_block_is_understood(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(BLOCKS[path]), "a block has no language, or is not closed"
    assert text.count("<!-- not run") == sum(block.reason is not None for block in BLOCKS[path])
    assert {block.language for block in BLOCKS[path]} <= {*INTERPRETERS, "yaml", "text"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=title)
def test_links_lead_somewhere(path):
    targets = [match["target"] for match in LINK.finditer(path.read_text(encoding="utf-8"))]
    assert not [target for target in targets if not (path.parent / target).exists()]
