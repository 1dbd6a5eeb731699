"""The account of what became of every record, and the switch between an error and a counted skip."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headrace.errors import UserError


@dataclass
class Tally:
    """Counts of records read, left out and cut.

    Attributes:
        bad_records: ``error`` raises at the first flawed record, ``skip`` counts it.
        records: records that gave at least one document.
        skipped: records left out because they are flawed or have nothing to train on.
        first_skipped: place and reason of the first of them.
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

    def reject(self, place: str, reason: str) -> None:
        """Leave the record at ``place`` out; ``reason`` continues a sentence that begins with the place.

        Raises UserError unless flawed records are to be skipped.
        """
        sentence = f"{place} {reason}"
        if self.bad_records == "error":
            raise UserError(f"{sentence}; correct it, or leave such records out with data.bad_records=skip")
        self.skipped += 1
        self.first_skipped = self.first_skipped or sentence

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
