"""Chats, rendered by the tokenizer's own template, with a mask of what the assistant says.

What the assistant says is known in one of two ways, both exact. A template with ``{% generation %}`` marks
says it itself. For any other, answer k is the difference between the render of the messages before it with
the generation prompt, and the render of the messages up to it. Both must be beginnings of the whole render,
in characters and in tokens; a template for which they aren't is refused.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np

from headrace.data.borders import find_borders
from headrace.data.config import Format, LossOn
from headrace.data.conversations import READERS, Message
from headrace.data.formats import Document, Mask, checked_text
from headrace.data.sources import Record
from headrace.data.tally import Tally
from headrace.data.tokens import Encoding, Tokenizer, encode_with_offsets
from headrace.errors import UserError, reason

_ROLES = {"system", "user", "assistant"}
"""Roles that every template knows; one that knows others must show that it does."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WAY_OUT = "mark the answers with {% generation %} in the template, or set data.loss_on to completion or all"

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Chat:
    """A rendered chat and the characters of every answer in it."""

    record: Record
    text: str
    answers: tuple[Span, ...]


class ChatEncoder:
    """Chats; trained are all answers, the last answer (``completion``), or everything."""

    def __init__(self, tokenizer: Tokenizer, loss_on: LossOn, format: Format = "messages") -> None:
        """Raises UserError when the tokenizer has no chat template, or several without a default one.

        Args:
            tokenizer: its chat template renders the chats.
            loss_on: what is trained.
            format: how records hold a chat.
        """
        if not tokenizer.chat_template:
            directory = tokenizer.name_or_path or "the model's directory"
            raise UserError(
                f"data.format={format} needs a chat template and the tokenizer has none; "
                f"add chat_template.jinja to {directory}"
            )
        self._read = READERS[format]
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"the tokenizer's chat template cannot be used ({reason(error)}): leave one in "
                "chat_template.jinja"
            ) from error
        self._marked = _MARKS.search(template) is not None

    def encode(self, records: Sequence[Record], tally: Tally) -> Iterator[Document]:
        """See :class:`headrace.data.formats.Encoder`.

        Raises UserError when the template doesn't tell answers from the rest.
        """
        chats = [
            (record, messages) for record in records if (messages := self._read(record, tally)) is not None
        ]
        if self._marked and self._loss_on != "all":
            yield from self._by_marks(chats, tally)
        else:
            yield from self._by_prefixes(chats, tally)

    def _by_marks(self, chats: Sequence[tuple[Record, list[Message]]], tally: Tally) -> Iterator[Document]:
        for record, messages in chats:
            if self._render(messages, record.place, tally) is None:
                continue
            found = self._tokenizer.apply_chat_template(
                messages,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
            ids = np.asarray(found["input_ids"], dtype=np.int32)
            yield Document(record, ids, self._chosen(np.asarray(found["assistant_masks"], dtype=np.bool_)))

    def _chosen(self, answers: Mask) -> Mask:
        if self._loss_on == "assistant" or not answers.any():
            return answers
        last = int(np.flatnonzero(answers)[-1])
        before = np.flatnonzero(~answers[:last])
        return answers & (np.arange(len(answers)) > (before[-1] if len(before) else -1))

    def _by_prefixes(self, chats: Sequence[tuple[Record, list[Message]]], tally: Tally) -> Iterator[Document]:
        rendered = [chat for record, messages in chats if (chat := self._chat(record, messages, tally))]
        encodings = encode_with_offsets(self._tokenizer, [chat.text for chat in rendered])
        if self._loss_on == "all":
            masks: list[Mask | None] = [np.ones(len(found.ids), dtype=np.bool_) for found in encodings]
        else:
            masks = self._masks(rendered, encodings)
        for chat, found, mask in zip(rendered, encodings, masks, strict=True):
            if mask is None:
                tally.reject(
                    chat.record.place,
                    "has an answer that shares a token with the chat template around it; "
                    "take the white space off its ends",
                )
            else:
                yield Document(chat.record, found.ids, mask)

    def _chat(self, record: Record, messages: list[Message], tally: Tally) -> _Chat | None:
        text = self._render(messages, record.place, tally)
        if text is None:
            return None
        if self._loss_on == "all":
            return _Chat(record, text, ())
        numbers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            tally.reject(record.place, "has no message of the role 'assistant'")
            return None
        if numbers[0] == 0:
            tally.reject(record.place, "begins with an answer: there is no message before it")
            return None
        numbers = numbers[-1:] if self._loss_on == "completion" else numbers
        answers = tuple(self._answer(messages, k, text, record.place) for k in numbers)
        return _Chat(record, text, answers)

    def _render(self, messages: list[Message], place: str, tally: Tally) -> str | None:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"line {error.lineno} of the tokenizer's chat template is no valid Jinja ({reason(error)}): "
                "correct it, or fetch it again"
            ) from error
        except Exception as error:  # a template is a program, and can fail as any other
            tally.reject(place, f"is refused by the chat template ({reason(error)})")
            return None
        if (odd := self._left_out(messages, text)) is not None:
            flaw = f"has a message {odd + 1} that the chat template leaves out; its role is"
            tally.reject(place, f"{flaw} {messages[odd]['role']!r}")
            return None
        return checked_text(text, "in the rendered chat", place, tally)

    def _left_out(self, messages: list[Message], text: str) -> int | None:
        """The first message of an uncommon role without which the template gives the same ``text``."""
        for number, message in enumerate(messages):
            if message["role"] not in _ROLES:
                others = messages[:number] + messages[number + 1 :]
                try:
                    without = self._tokenizer.apply_chat_template(others, tokenize=False)
                except Exception:  # so the message makes a difference
                    continue
                if without == text:
                    return number
        return None

    def _answer(self, messages: list[Message], k: int, text: str, place: str) -> Span:
        start = self._length_of(messages[:k], text, place, prompt=True)
        return start, self._length_of(messages[: k + 1], text, place, prompt=False)

    def _length_of(self, messages: list[Message], text: str, place: str, *, prompt: bool) -> int:
        try:
            part = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program, and can fail as any other
            part, why = None, f" ({reason(error)})"
        else:
            why = ""
        if part is None or not text.startswith(part):
            raise UserError(
                f"the chat template does not render the first {len(messages)} messages of {place} as the "
                f"beginning of the whole chat{why}, so answers can't be told from the rest: {_WAY_OUT}"
            )
        return len(part)

    def _masks(self, chats: Sequence[_Chat], encodings: Sequence[Encoding]) -> list[Mask | None]:
        """A mask for each chat, or None where a border of an answer lies inside a token."""
        texts = [chat.text for chat in chats]
        cuts = [[cut for answer in chat.answers for cut in answer] for chat in chats]
        borders = find_borders(self._tokenizer, texts, encodings, cuts)
        return [self._mask(*each) for each in zip(chats, encodings, borders, strict=True)]

    def _mask(self, chat: _Chat, found: Encoding, borders: Sequence[int | None]) -> Mask | None:
        mask = np.zeros(len(found.ids), dtype=np.bool_)
        for number, (_, stop) in enumerate(chat.answers):
            begin, end = borders[2 * number : 2 * number + 2]
            if begin is None or end is None:
                return None
            mask[begin : self._end_of_turn(chat.text, found, begin, end, stop)] = True
        return mask

    def _end_of_turn(self, text: str, found: Encoding, begin: int, end: int, stop: int) -> int:
        """``end``, or where the EOS ends: white space after it is the template's, never the model's."""
        closing = np.flatnonzero(found.ids[begin:end] == self._tokenizer.eos_token_id)
        if len(closing):
            after = begin + int(closing[-1]) + 1
            if not text[found.ends[after - 1] : stop].strip():
                return after
        return end
