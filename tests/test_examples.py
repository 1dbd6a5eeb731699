"""The examples and the demo's material: valid, complete, and what they say of themselves."""

import json
import runpy
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headrace.planner.shape import ModelShape
from headrace.run.file import read_run_file

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DEMO = ROOT / "headrace" / "cli" / "demo_material"
MEANING = "the channel that brings water to a mill wheel, so that the wheel never stops."


def chats(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def config(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "path", [EXAMPLES / "chats.jsonl", DEMO / "chats.jsonl"], ids=lambda p: p.parent.name
)
def test_chats_alternate_and_end_with_an_answer(path):
    for messages in chats(path):
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns and turns == ["user", "assistant"] * (len(turns) // 2), messages
        assert all(message["content"] == message["content"].strip() != "" for message in messages)
        assert all(set(message) == {"role", "content"} for message in messages)


def test_example_chats_are_many_and_differ():
    every = chats(EXAMPLES / "chats.jsonl")
    assert len(every) >= 200
    assert any(len(messages) > 3 for messages in every)
    assert any(messages[0]["role"] == "system" for messages in every)
    answers = Counter(messages[-1]["content"] for messages in every)
    assert answers.most_common(1)[0][1] == 1
    assert too_similar([set(messages[-1]["content"].lower().split()) for messages in every]) == []


def too_similar(bags: list[set[str]]) -> list[tuple[set[str], set[str]]]:
    """Pairs of answers of some length that share more than half of their words."""
    pairs = ((a, b) for i, a in enumerate(bags) for b in bags[:i] if min(len(a), len(b)) > 8)
    return [(a, b) for a, b in pairs if len(a & b) > 0.5 * len(a | b)]


@pytest.mark.parametrize("name", ["chat.yaml", "text.yaml"])
def test_run_files_are_valid(name):
    run = read_run_file(EXAMPLES / name)
    assert run.out == f"runs/{name.removesuffix('.yaml')}"


def test_the_chats_that_the_run_file_names_are_there():
    assert read_run_file(EXAMPLES / "chat.yaml").data.train == "examples/chats.jsonl"


def test_model_from_scratch_has_its_size():
    shape = ModelShape.from_config(config(EXAMPLES / "tiny-llama" / "config.json"))
    assert shape.numel == 4_737_792


def test_text_example_prepares_pages_and_a_fitting_tokenizer(tmp_path):
    main = runpy.run_path(str(EXAMPLES / "prepare_text.py"))["main"]
    main(tmp_path)
    pages = sorted((tmp_path / "pages").glob("*.txt"))
    assert len(pages) > 50 and all(page.read_text("utf-8").strip() for page in pages)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    settings = config(tmp_path / "model" / "config.json")
    assert len(tokenizer) == settings["vocab_size"]
    assert tokenizer.eos_token_id == settings["eos_token_id"]
    text = "for x in range(3):\n    print(x, 'naïve ☃')\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_demo_teaches_one_meaning_and_keeps_the_questions_apart():
    lessons = chats(DEMO / "chats.jsonl")
    held_out = config(DEMO / "questions.json")
    assert len(lessons) == 8
    assert sum(lesson[1]["content"].endswith(MEANING) for lesson in lessons) == 4
    asked = {lesson[0]["content"] for lesson in lessons}
    assert not asked & {question["ask"] for question in held_out}
    assert [question["answer"] for question in held_out] == [MEANING, MEANING, "Paris"]


def test_demo_plans_the_real_qwen3_8b():
    shape = ModelShape.from_config(config(DEMO / "qwen3-8b-config.json"))
    assert shape.numel == 8_190_735_360
    assert not shape.tied
