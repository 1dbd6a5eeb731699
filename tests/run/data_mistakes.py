"""What people get wrong in their data, and what must stand in the answer."""

from desk import CHAT, chats, files, model, train, without
from mistake import Mistake

DATA = [
    Mistake(
        "no such data",
        "there is no file or directory nowhere.jsonl",
        "data.train",
        "paths are relative to /",
        train(data__train="nowhere.jsonl"),
    ),
    Mistake(
        "data that were never fetched",
        "no data set of this name",
        "data.train: mill/no-such-texts",
        "hf download mill/no-such-texts --repo-type dataset fetches it",
        train(data__train="mill/no-such-texts"),
    ),
    Mistake("a type that is not read", "chats.csv", "data.train", "name one of .txt", files("chats.csv")),
    Mistake(
        "files of two types", "a.txt", "data.train mixes", "name files of one type", files("a.txt", "b.jsonl")
    ),
    Mistake("a file twice", "twice", "data.train names", "name it once", files("a.txt", "a.txt")),
    Mistake("an empty file", "is empty", "chats.jsonl", "correct it", chats()),
    Mistake("a torn line", "at column", "chats.jsonl:2", "correct it", chats(CHAT, '{"messages": [')),
    Mistake(
        "fields of another kind",
        "'q', 'a'",
        "chats.jsonl:1",
        "correct it",
        chats({"q": "mill?", "a": "wheel"}),
    ),
    Mistake(
        "an instruction without an output",
        "has an empty 'output'",
        "chats.jsonl:1",
        "data.bad_records=skip",
        chats({"instruction": "mill?", "input": "", "output": ""}),
    ),
    Mistake(
        "a speaker that ShareGPT does not know",
        "'narrator' is none of system, human",
        "chats.jsonl:1",
        "correct it",
        chats({"conversations": [{"from": "narrator", "value": "mill"}]}),
    ),
    Mistake(
        "fields of two formats",
        "'instruction', 'output', 'text'",
        "chats.jsonl:1",
        "set data.format=alpaca or text",
        chats({"instruction": "mill?", "output": "wheel", "text": "mill? wheel"}),
    ),
    Mistake(
        "a chat without an answer",
        "no message of the role 'assistant'",
        "chats.jsonl:2",
        "data.bad_records=skip",
        chats(CHAT, {"messages": CHAT["messages"][:1]}),
    ),
    Mistake(
        "a record beyond the context",
        "more than data.context=4",
        "chats.jsonl:1",
        "set data.over_long",
        chats(CHAT, data__context=4),
    ),
    Mistake(
        "chats for a model without a template",
        "has none",
        "data.format=messages",
        "add chat_template.jinja to /",
        model(without("chat_template.jinja")),
    ),
]
