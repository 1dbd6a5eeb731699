"""manifest.json: which files make up a checkpoint, and what must be the same for a bit-equal continuation."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headrace import __version__
from headrace.checkpoint.changes import differences
from headrace.errors import UserError
from headrace.memory.tensorfile import FileRecord

FORMAT = 1
"""Version of what a checkpoint's directory holds; one that this code cannot read gets another number."""

NAME = "manifest.json"


class DamagedCheckpoint(UserError):
    """A checkpoint that is torn, truncated or altered: the message names the file and what is wrong."""


@dataclass(frozen=True)
class Environment:
    """What decides the last bits of a step besides the plan.

    Attributes:
        instruction_set: of the CPU, as torch uses it: ``AVX512``.
        accelerator: name of the device, ``none`` without one.
        versions: of python, torch, transformers and headrace.
        threads: purpose or lane -> number of threads.
        ranks: number of processes in the run.
    """

    instruction_set: str
    accelerator: str
    versions: dict[str, str]
    threads: dict[str, int]
    ranks: int

    @classmethod
    def here(cls, threads: Mapping[str, int], ranks: int = 1) -> "Environment":
        """The environment of this process."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        versions |= {"transformers": version("transformers"), "headrace": __version__}
        accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        capability = torch.backends.cpu.get_cpu_capability()
        return cls(capability, accelerator, versions, dict(threads), ranks)

    def differences(self, now: "Environment") -> list[str]:
        """``versions.torch: 2.12.0 -> 2.13.0`` for everything that is not as it was."""
        return [f"{key}: {change}" for key, change in differences(asdict(self), asdict(now)).items()]


@dataclass(frozen=True)
class Manifest:
    """The step, the files and the environment of one checkpoint.

    Attributes:
        step: optimizer steps that were done.
        files: read as a whole, with the SHA-256 of their bytes.
        environment: what a bit-equal continuation needs.
        blocks: files of a disk store, with the SHA-256 of their headers, which hold checksums of the rest.
    """

    step: int
    files: tuple[FileRecord, ...]
    environment: Environment
    blocks: tuple[FileRecord, ...] = ()

    def write(self, directory: Path) -> None:
        """Write ``manifest.json``, sealed by a checksum over its own content."""
        body = {"format": FORMAT, **asdict(self)}
        write_durably(directory / NAME, json.dumps({**body, "sha256": _seal(body)}, indent=1))

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The inverse of ``write``.

        Raises DamagedCheckpoint when it is missing or altered, UserError when its format is another one.
        """
        path = directory / NAME
        body = _read_sealed(path)
        if body["format"] != FORMAT:
            raise UserError(
                f"{path} has format {body['format']}, headrace {__version__} reads {FORMAT}: "
                "go on with the version that wrote it"
            )
        files, blocks = (tuple(FileRecord(**r) for r in body.get(key, ())) for key in ("files", "blocks"))
        return cls(body["step"], files, Environment(**body["environment"]), blocks)


def write_durably(path: Path, text: str) -> FileRecord:
    """Write a new text file and wait until it is on the disk."""
    data = text.encode()
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())


def _read_sealed(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text("utf-8"))
        seal = body.pop("sha256")
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is not a complete manifest ({error})") from error
    if seal != _seal(body):
        raise DamagedCheckpoint(f"{path} was altered: it does not fit its own checksum")
    return body


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
