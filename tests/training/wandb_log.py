"""Reads the file in which W&B keeps a run: records of protobuf in a log of LevelDB's format.

After a head of 7 bytes come blocks of 32 KiB. A chunk in a block is: checksum (4 bytes), length (2), kind
(1), data. A record is one whole chunk (kind 1), or a first, any number of middle and a last one (2, 3, 4).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 2**15, 7


def records(file: Path) -> Iterator[Record]:
    """Every record of one session."""
    content, place, parts = file.read_bytes(), HEAD, b""
    while place + HEAD <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEAD:  # too little for another chunk's head
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEAD])
        if not kind:
            break
        parts += content[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(file: Path) -> list[dict[str, float]]:
    """What was logged, call by call, without what W&B adds."""
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = (("/".join(item.nested_key) or item.key, item.value_json) for item in record.history.item)
            rows.append({key: json.loads(value) for key, value in items if not key.startswith("_")})
    return rows


def run_ids(file: Path) -> list[str]:
    """The id of the run that the file is of, as it stands in its records."""
    return [record.run.run_id for record in records(file) if record.WhichOneof("record_type") == "run"]


def settings(file: Path) -> dict[str, Any]:
    """The run's config, without what W&B adds."""
    found = (record.run for record in records(file) if record.WhichOneof("record_type") == "run")
    items = (item for run in found for item in run.config.update)
    return {item.key: json.loads(item.value_json) for item in items if not item.key.startswith("_")}
