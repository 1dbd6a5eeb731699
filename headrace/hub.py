"""Models and data sets of the Hugging Face hub, as the local cache has them; the network is never asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")

_FILE = re.compile(r".*\.(jsonl?|ndjson|parquet|te?xt|csv|gguf|safetensors|ya?ml)", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """What is called ``org/name`` on the hub, or ``org/name@revision``.

    Attributes:
        kind: what it is; a model and a data set may have one id.
        id: organisation and name.
        revision: a branch, a tag or a whole commit hash.
    """

    kind: Literal["model", "dataset"]
    id: str
    revision: str = "main"

    @property
    def command(self) -> str:
        """The command that fetches it into the cache."""
        options = " --repo-type dataset" if self.kind == "dataset" else ""
        options += "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download {self.id}{options}"

    def snapshot(self, patterns: Sequence[str]) -> Path | None:
        """The directory of the cached files, named after their commit; None where there is none.

        Args:
            patterns: file names. Where the cache knows that files of these names exist on the hub and it has
                not all of them, that is none.
        """
        # It takes a while, and few need it.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            found = snapshot_download(
                self.id,
                repo_type=self.kind,
                revision=self.revision,
                local_files_only=True,
                allow_patterns=list(patterns),
            )
        except (HFValidationError, LocalEntryNotFoundError):
            return None
        return Path(found)


def hub_name(name: str, kind: Literal["model", "dataset"]) -> HubName | None:
    """``name`` as one of the hub; None where it is a path that exists, or looks like that of a file.

    A path that the system refuses to look at is a path: who opens it says what is wrong with it.
    """
    match = _ID.fullmatch(name)
    if match is None or _FILE.fullmatch(name):
        return None
    try:
        is_path = Path(name).exists()
    except OSError:
        is_path = True
    return None if is_path else HubName(kind, match[1], match[2] or "main")


def cache_directory() -> str:
    """Where the cache is, as HF_HUB_CACHE or HF_HOME say."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
