"""Records of the three chat formats, read as the messages that a chat template takes. No torch."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.data.config import Format
from headrace.data.formats import checked_text, field_names, text_field
from headrace.data.sources import Record
from headrace.data.tally import Tally

_UNSUPPORTED = ("tools", "functions", "tool_calls", "function_call")
"""What calls of tools are written in, beside or in messages."""

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
}
"""ShareGPT's name of who speaks -> the role."""

Message = dict[str, Any]


def read_messages(record: Record, tally: Tally) -> list[Message] | None:
    """``messages``, each with a role and a content in text, or None after a rejection."""
    messages = _turns(record, "messages", tally)
    if messages is None:
        return None
    sound = all(_is_message(message, n, record.place, tally) for n, message in enumerate(messages, start=1))
    return messages if sound else None


def read_sharegpt(record: Record, tally: Tally) -> list[Message] | None:
    """``conversations`` of {from, value}, with an optional ``system`` before them, or None after a rejection.

    Only a system turn may be empty.
    """
    turns = _turns(record, "conversations", tally)
    system = None if turns is None else _optional_text(record, "system", tally)
    if turns is None or system is None:
        return None
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns, start=1):
        message = _message_of(turn, number, record.place, tally)
        if message is None:
            return None
        if system and message["role"] == "system":
            tally.reject(record.place, f"has both 'system' and a system turn {number}: leave one")
            return None
        messages.append(message)
    return messages


def read_alpaca(record: Record, tally: Tally) -> list[Message] | None:
    """``system`` and ``history`` if there are any, then ``instruction`` with ``input``, and ``output``.

    None after a rejection.
    """
    if called := _first_call(record.fields):
        tally.reject(record.place, f"has '{called}', which are not supported")
        return None
    instruction = text_field(record, "instruction", tally)
    output = None if instruction is None else text_field(record, "output", tally)
    added = None if output is None else _optional_text(record, "input", tally)
    system = None if added is None else _optional_text(record, "system", tally)
    history = None if system is None else _history(record, tally)
    if instruction is None or output is None or added is None or system is None or history is None:
        return None
    question = "\n\n".join(part for part in (instruction, added) if part.strip())
    for name, text in (("instruction", question), ("output", output)):
        if not text.strip():
            tally.reject(record.place, f"has an empty '{name}'")
            return None
    opening = [("system", system)] if system else []
    spoken = [*opening, *history, ("user", question), ("assistant", output)]
    return [{"role": role, "content": text} for role, text in spoken]


READERS: Mapping[Format, Callable[[Record, Tally], list[Message] | None]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
}


def _turns(record: Record, name: str, tally: Tally) -> list[Any] | None:
    """The list in field ``name``, or None after a rejection."""
    turns = record.fields.get(name)
    flaw = None
    if name not in record.fields:
        flaw = f"has no field '{name}' but {field_names(record)}"
    elif called := _first_call(record.fields):
        flaw = f"has '{called}', which are not supported"
    elif not isinstance(turns, list) or not turns:
        flaw = f"has no list of messages in '{name}'"
    if flaw is not None:
        tally.reject(record.place, flaw)
        return None
    return turns


def _is_message(message: Any, number: int, place: str, tally: Tally) -> bool:
    if not isinstance(message, dict):
        tally.reject(place, f"has a message {number} that is no object with 'role' and 'content'")
        return False
    if called := _first_call(message):
        tally.reject(place, f"has '{called}' in message {number}, which are not supported")
        return False
    found = (
        checked_text(message.get(key), f"in '{key}' of message {number}", place, tally)
        for key in ("role", "content")
    )
    return all(text is not None for text in found)


def _message_of(turn: Any, number: int, place: str, tally: Tally) -> Message | None:
    """A turn of ShareGPT as a message, or None after a rejection."""
    flaw = None
    if not isinstance(turn, dict):
        flaw = f"has a turn {number} that is no object with 'from' and 'value'"
    elif "from" not in turn and {"role", "content"} <= turn.keys():
        flaw = f"has 'role' and 'content' in turn {number}: rename 'conversations' to 'messages'"
    elif called := _first_call(turn):
        flaw = f"has '{called}' in turn {number}, which are not supported"
    if flaw is not None:
        tally.reject(place, flaw)
        return None
    speaker = checked_text(turn.get("from"), f"in 'from' of turn {number}", place, tally)
    value = (
        None
        if speaker is None
        else checked_text(turn.get("value"), f"in 'value' of turn {number}", place, tally)
    )
    if speaker is None or value is None:
        return None
    role = _SPEAKERS.get(speaker)
    if role is None:
        flaw = f"has a turn {number} from an unknown speaker: {speaker!r} is none of {', '.join(_SPEAKERS)}"
    elif role != "system" and not value.strip():
        flaw = f"has an empty 'value' in turn {number}"
    elif role == "assistant" and turn.get("weight") not in (None, 1):
        flaw = f"has an answer of another weight than 1 in turn {number}: 'weight' is not supported"
    if flaw is not None:
        tally.reject(place, flaw)
        return None
    return {"role": role, "content": value}


def _optional_text(record: Record, name: str, tally: Tally) -> str | None:
    """The text in field ``name``, empty where there is none, or None after a rejection."""
    value = record.fields.get(name)
    return "" if value is None else checked_text(value, f"in '{name}'", record.place, tally)


def _history(record: Record, tally: Tally) -> list[tuple[str, str]] | None:
    """Role and text of what was said before, or None after a rejection."""
    pairs = record.fields.get("history")
    if pairs is None:
        return []
    spoken: list[tuple[str, str]] = []
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs], start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            tally.reject(record.place, f"has in 'history' no pair of question and answer as entry {number}")
            return None
        for role, value in zip(("user", "assistant"), pair, strict=True):
            text = checked_text(value, f"in entry {number} of 'history'", record.place, tally)
            if text is not None and not text.strip():
                tally.reject(record.place, f"has an empty text in entry {number} of 'history'")
                text = None
            if text is None:
                return None
            spoken.append((role, text))
    return spoken


def _first_call(fields: Mapping[str, Any]) -> str | None:
    """The name of a field in which tools are offered or called; empty ones, as Parquet has them, are none."""
    return next((name for name in _UNSUPPORTED if fields.get(name)), None)
