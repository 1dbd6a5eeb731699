"""Records of text and of prompt and completion, made into token ids and a mask of what is trained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.data.config import Format, LossOn
from headrace.data.sources import Record
from headrace.data.tally import Tally
from headrace.data.tokens import IdArray, Tokenizer, encode, frame
from headrace.errors import UserError

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids with a mask of those that are trained, both [tokens], and the record they came from.

    The first token of a document is never predicted, whatever the mask says.
    """

    record: Record
    ids: IdArray
    trained: Mask

    @property
    def trained_tokens(self) -> int:
        """Tokens that something before them predicts and that are trained."""
        return int(self.trained[1:].sum())

    def part(self, start: int, stop: int) -> "Document":
        """The tokens from ``start`` to ``stop``, or to the end if that comes first."""
        return replace(self, ids=self.ids[start:stop], trained=self.trained[start:stop])

    def joined(self, following: "Document") -> "Document":
        """The tokens of this and then of ``following``, whose record it takes."""
        ids = np.concatenate([self.ids, following.ids])
        return Document(following.record, ids, np.concatenate([self.trained, following.trained]))


class Encoder(Protocol):
    """Makes documents from records of one format."""

    def encode(self, records: Sequence[Record], tally: Tally) -> Iterator[Document]:
        """One document for each record that isn't rejected in ``tally``, in order."""
        ...


def detect_format(record: Record, tally: Tally) -> Format | None:
    """The format whose fields ``record`` has, or None after a rejection.

    Raises UserError when it has the fields of several.
    """
    has = record.fields.keys()
    fitting: list[Format] = []
    fitting += ["messages"] if "messages" in has else []
    fitting += ["completion"] if {"prompt", "completion"} <= has else []
    fitting += ["alpaca"] if {"instruction", "output"} <= has else []
    fitting += ["sharegpt"] if "conversations" in has else []
    fitting += ["text"] if "text" in has else []
    if len(fitting) > 1:
        choices = " or ".join(fitting)
        raise UserError(
            f"{record.place} fits several formats ({field_names(record)}); set data.format={choices}"
        )
    if not fitting:
        needed = "text, or prompt and completion, or messages, or instruction and output, or conversations"
        tally.reject(record.place, f"has the fields {field_names(record)} where {needed} are needed")
        return None
    return fitting[0]


def field_names(record: Record) -> str:
    """The names of a record's fields, for an error message."""
    return ", ".join(map(repr, record.fields)) or "(none)"


def text_field(record: Record, name: str, tally: Tally) -> str | None:
    """The text in field ``name``, or None after a rejection."""
    if name not in record.fields:
        tally.reject(record.place, f"has no field '{name}' but {field_names(record)}")
        return None
    return checked_text(record.fields[name], f"in '{name}'", record.place, tally)


def checked_text(value: Any, where: str, place: str, tally: Tally) -> str | None:
    """``value`` if it is text that can be written as UTF-8, or None after a rejection."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        tally.reject(place, f"has no text {where} but {kind}")
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        tally.reject(place, f"has half of a surrogate pair {where}, which no UTF-8 text can hold")
        return None
    return value


class TextEncoder:
    """Plain text: everything is trained."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = frame(tokenizer)

    def encode(self, records: Sequence[Record], tally: Tally) -> Iterator[Document]:
        """See :class:`Encoder`; only the first block of a text gets a BOS and only the last an EOS."""
        kept = [(record, text) for record in records if (text := self._text(record, tally)) is not None]
        ids_of = encode(self._tokenizer, [text for _, text in kept])
        for (record, _), ids in zip(kept, ids_of, strict=True):
            parts = [self._before] * record.first + [ids] + [self._after] * record.last
            whole = np.concatenate(parts)
            yield Document(record, whole, np.ones(len(whole), dtype=np.bool_))

    @staticmethod
    def _text(record: Record, tally: Tally) -> str | None:
        text = text_field(record, "text", tally)
        if text is not None and record.first and record.last and not text.strip():
            tally.reject(record.place, "has an empty 'text'")
            return None
        return text


class CompletionEncoder:
    """Prompt and completion as one text, tokenised as it would be without a border between the two.

    The prompt is what stands in front of the first token that differs from the prompt tokenised alone. So a
    token that holds the end of the prompt and the start of the completion counts as completion.
    """

    def __init__(self, tokenizer: Tokenizer, loss_on: LossOn) -> None:
        self._tokenizer = tokenizer
        self._on_all = loss_on == "all"
        self._before, self._after = frame(tokenizer)

    def encode(self, records: Sequence[Record], tally: Tally) -> Iterator[Document]:
        """See :class:`Encoder`."""
        kept = [(record, pair) for record in records if (pair := self._pair(record, tally)) is not None]
        ids_of = encode(self._tokenizer, [prompt + answer for _, (prompt, answer) in kept])
        prompts = encode(self._tokenizer, [prompt for _, (prompt, _) in kept])
        for (record, _), ids, prompt in zip(kept, ids_of, prompts, strict=True):
            border = _agreeing(ids, prompt)
            tally.shared_borders += border < len(prompt)
            yield self._document(record, ids, border)

    @staticmethod
    def _pair(record: Record, tally: Tally) -> tuple[str, str] | None:
        prompt = text_field(record, "prompt", tally)
        answer = None if prompt is None else text_field(record, "completion", tally)
        return None if prompt is None or answer is None else (prompt, answer)

    def _document(self, record: Record, ids: IdArray, border: int) -> Document:
        whole = np.concatenate([self._before, ids, self._after])
        untrained = 0 if self._on_all else len(self._before) + border
        return Document(record, whole, np.arange(len(whole)) >= untrained)


def _agreeing(a: IdArray, b: IdArray) -> int:
    """Length of the longest common beginning."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter
