"""A user's own demonstrations: every field arrives, and what cannot be one is named with its line."""

import pytest
from rows_rig import write_rows

from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import DemoTurn, load_demonstrations

ANSWER = {"text": "<think> so </think>\n<answer> ada </answer>"}
SEARCH = "<think> find it </think>\n<search> silent garden </search>"


def row(*turns, **changes):
    fields = {"id": "1", "question": "who?", "golden_answers": ["ada", "Ada L."], "data_source": "mine"}
    return fields | {"turns": list(turns)} | changes


def test_every_field_arrives_in_order(tmp_path):
    fields = [("7", "Garden", "by Ada"), ("Other", "Other", ""), ("x", "Garden", "a second of that title")]
    documents = [{"id": name, "title": title, "text": text} for name, title, text in fields]
    documents[0]["id"] = 7
    del documents[1]["id"]  # known by its title
    path = write_rows(
        tmp_path / "demos.jsonl",
        row({"text": SEARCH, "documents": documents}, ANSWER),
        row(ANSWER, id="2", supporting_ids=[7]),
    )
    first, second = load_demonstrations(path)
    assert first.question == Question("1", "who?", ("ada", "Ada L."), "mine")
    shown = tuple(Document(*values) for values in fields)
    assert first.turns == (DemoTurn(SEARCH, shown), DemoTurn(ANSWER["text"]))
    assert second.question.supporting_ids == ("7",) and len(second.turns) == 1


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"text": "<think> only a thought </think>"}, "a turn must hold <search> query"),
        ({"text": "<search> </search>"}, "a turn must hold <search> query"),
        ({"text": ""}, "every turn needs a non-empty 'text'"),
        ({"text": "<answer> a <search> b </search> </answer>"}, "a turn must hold <search> query"),
        ({"text": "  "}, "every turn needs a non-empty 'text'"),
        ("<answer> ada </answer>", "every turn needs a non-empty 'text'"),
        ({"text": SEARCH, "documents": {"title": "a", "text": "b"}}, "'documents' must be a list"),
        ({"text": SEARCH, "documents": [{"title": "a"}]}, "'documents' must be a list"),
        ({"text": SEARCH, "documents": [{"title": 1, "text": "b"}]}, "'documents' must be a list"),
        ({"text": SEARCH, "observation": 3}, "'observation' must be a text, got 3"),
    ],
)
def test_invalid_turn_is_named_with_its_line(tmp_path, turn, message):
    path = write_rows(tmp_path / "demos.jsonl", row(ANSWER), row(ANSWER, turn))
    with pytest.raises(UserError, match=f"demos.jsonl:2: {message}"):
        load_demonstrations(path)


def test_lone_surrogate_is_replaced_in_turns_and_messages(tmp_path):
    output = "<think> so \ud83d </think>\n<answer> ada </answer>"
    chat = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": output}]
    path = write_rows(
        tmp_path / "demos.jsonl", row({"text": output}, supporting_ids=["\ud83d"]), {"messages": chat}
    )
    ours, other = load_demonstrations(path)
    assert ours.turns[0].text == other.turns[0].text == output.replace("\ud83d", "\ufffd")
    assert ours.question.supporting_ids == ("\ufffd",)
    build_word_tokenizer().encode(ours.turns[0].text)


def test_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="none.jsonl: no such file of demonstrations"):
        load_demonstrations(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="'messages' must be a non-empty list, got 'x'"):
        load_demonstrations(write_rows(tmp_path / "demos.jsonl", {"messages": "x"}))
    with pytest.raises(UserError, match="no demonstrations in it"):
        load_demonstrations(write_rows(tmp_path / "demos.jsonl"))


def test_chat_question_ends_with_its_line(tmp_path):
    prompt = "Answer it.\nQuestion: who wrote it?\nThink first."
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": ANSWER["text"]}]
    plain = [{"role": "user", "content": "who?\nThink first."}, messages[1]]
    quoting = [{"role": "user", "content": "Question: what is Question:?"}, messages[1]]
    search = {"role": "assistant", "content": SEARCH}
    shown = ["See <information> a </information>", " <information> b </information>\n"]
    looked_up = [plain[0], search, *({"role": "tool", "content": text} for text in shown), messages[1]]
    rows = {"messages": messages}, {"messages": plain, "id": 2.0}, {"messages": quoting}
    own = {"messages": looked_up, "question": "asked?"}
    first, second, third, fourth = load_demonstrations(write_rows(tmp_path / "demos.jsonl", *rows, own))
    assert fourth.question.text == "asked?" and fourth.turns[0].observation == f"{shown[0]}\nb"
    assert third.question.text == "Question: what is Question:?"
    assert first.question.text == "who wrote it?" and second.question.text == "who?\nThink first."
    assert second.question.id == "2"
