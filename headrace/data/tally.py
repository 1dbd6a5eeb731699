"""The account of what became of every record, and the switch between an error and a counted skip."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headrace.errors import UserError

_PARTICULARS = re.compile(r" \(| but |[;:]")
"""Where a reason goes over to what only one record has."""

_KINDS = 20  # of reasons that are told apart


@dataclass
class Tally:
    """Counts of records read, left out and cut.

    Attributes:
        bad_records: ``error`` raises at the first flawed record, ``skip`` counts it.
        records: records that gave at least one document.
        skipped: records left out because they are flawed or have nothing to train on.
        first_skipped: place and reason of the first of them.
        reasons: why, without what only one record has, and how many of them.
        over_long: records left out because they are longer than the context.
        cut: records cut down to the context.
        shared_borders: records whose prompt and completion have one token in common.
    """

    bad_records: Literal["error", "skip"] = "error"
    records: int = 0
    skipped: int = 0
    first_skipped: str = ""
    over_long: int = 0
    cut: int = 0
    shared_borders: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Records that there are, used or not."""
        return self.records + self.skipped + self.over_long

    def reject(self, place: str, reason: str) -> None:
        """Leave the record at ``place`` out; ``reason`` continues a sentence that begins with the place.

        Raises UserError unless flawed records are to be skipped.
        """
        sentence = f"{place} {reason}"
        if self.bad_records == "error":
            raise UserError(f"{sentence}; correct it, or leave such records out with data.bad_records=skip")
        self.skipped += 1
        self.first_skipped = self.first_skipped or sentence
        kind = re.sub(r"\d+", "N", _PARTICULARS.split(reason)[0])
        kind = kind if kind in self.reasons or len(self.reasons) < _KINDS else "has another flaw"
        self.reasons[kind] = self.reasons.get(kind, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Tally":
        """The inverse of ``to_json``."""
        return cls(**data)

    def remarks(self, context: int) -> list[str]:
        """What a reader of the run must know: one phrase for each kind of record that isn't used as it is."""
        kinds = [
            (self.skipped, f"skipped, the first: {self.first_skipped}"),
            (self.over_long, f"longer than {context:,} tokens and left out"),
            (self.cut, f"cut to {context:,} tokens"),
            (
                self.shared_borders,
                "trained from a token that begins in the prompt (end prompts without a space)",
            ),
        ]
        return [f"{count:,} {'record' if count == 1 else 'records'} {what}" for count, what in kinds if count]
