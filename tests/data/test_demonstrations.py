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


def chat(question, *searched, answer=ANSWER["text"]):
    """Messages; `searched` are an assistant's search and the tool's messages."""
    messages = [("user", question), *zip(("assistant", "tool", "tool"), searched, strict=False)]
    return [{"role": role, "content": text} for role, text in (*messages, ("assistant", answer))]


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
        ({"text": "<search> </search>"}, "a turn must hold <search> query"),
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
    rows = row({"text": output}, supporting_ids=["\ud83d"]), {"messages": chat("who?", answer=output)}
    ours, other = load_demonstrations(write_rows(tmp_path / "demos.jsonl", *rows))
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
    shown = "See <information> a </information>", " <information> b </information>"
    rows = {
        "who wrote it?": {"messages": chat("Answer it.\nQuestion: who wrote it?\nThink first.")},
        "who?\nThink first.": {"messages": chat("who?\nThink first."), "id": 2.0},
        "Question: what is Question:?": {"messages": chat("Question: what is Question:?")},
        "asked?": {"messages": chat("who?", SEARCH, *shown), "question": "asked?"},
    }
    demonstrations = load_demonstrations(write_rows(tmp_path / "demos.jsonl", *rows.values()))
    assert [each.question.text for each in demonstrations] == list(rows)
    assert demonstrations[1].question.id == "2"
    assert demonstrations[3].turns[0].observation == f"{shown[0]}\nb"
