"""Chats of other projects, as questions and as demonstrations."""

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.data.questions import load_questions

ASKED = {"from": "human", "value": "Who wrote it?"}
ANSWERED = {"from": "gpt", "value": "It was Ada."}
OPENAI = {"role": "user", "content": "Who wrote it?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Who wrote it?"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who wrote it?", "label": "Ada", "metadata": {"x": 1}},  # slime
        {"prompt": [OPENAI], "label": "Ada"},
        {"prompt": [PARTS], "answer": "Ada"},
        {"context_messages": [OPENAI], "label": "Ada"},  # OpenRLHF
        {"input": "Who wrote it?", "label": "Ada"},
        {"input": "Who wrote it?", "output": "Ada"},  # NeMo-RL
        {"problem": "Who wrote it?", "expected_answer": "Ada"},
        {"responses_create_params": {"input": [OPENAI]}, "expected_answer": "Ada"},  # NeMo Gym
        {
            "messages": [OPENAI, {"role": "assistant", "content": "It was Ada."}],
            "solution": "Ada",
        },  # ms-swift
        {"messages": [OPENAI], "ground_truth": "Ada", "dataset": "x"},  # Open Instruct
        {"conversations": [ASKED, ANSWERED], "answer": "Ada"},
        {"conversations": [{"from": "system", "value": "Help."}, ASKED, ANSWERED], "label": "Ada"},
        {"instruction": "Who wrote it?", "input": "", "output": "Ada"},
    ],
)
def test_rows_of_other_projects_are_questions(tmp_path, row):
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row))
    assert (question.text, question.golden_answers) == ("Who wrote it?", ("Ada",))
    assert not question.prompt or question.prompt[-1] == Message("user", ("", ""))


@pytest.mark.parametrize("key", ["conversations", "dialog"])
def test_sharegpt_has_named_columns(tmp_path, key):
    path = write_rows(tmp_path / "q.jsonl", {key: [ASKED, ANSWERED], "gold": "Ada"})
    (question,) = load_questions(path, ColumnsConfig(key, "gold"))
    assert (question.text, question.golden_answers) == ("Who wrote it?", ("Ada",))


def test_chat_without_an_answer_or_with_several_questions_is_refused(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", {"conversations": [ASKED, ANSWERED], "id": 1})
    with pytest.raises(
        UserError, match="a chat in 'conversations' without golden answers: the keys are conver"
    ):
        load_questions(path)
    write_rows(path, {"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "answer": "Ada"})
    with pytest.raises(UserError, match="q.jsonl:1: a chat of several turns.*add a key with the question"):
        load_questions(path)


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
def test_demonstrations_have_the_names_of_either_project(tmp_path, key):
    openai = [PARTS, {"role": "assistant", "content": "<answer> Ada </answer>"}]
    sharegpt = [ASKED, {"from": "gpt", "value": "<answer> Ada </answer>"}]
    path = write_rows(tmp_path / "d.jsonl", {key: openai}, {key: sharegpt})
    demonstrations = load_demonstrations(path)
    assert [each.question.text for each in demonstrations] == ["Who wrote it?"] * 2
    assert [each.turns[0].text for each in demonstrations] == ["<answer> Ada </answer>"] * 2
