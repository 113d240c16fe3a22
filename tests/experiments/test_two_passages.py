"""experiments.two_passages: which questions are chosen, and what is measured of an evaluation."""

import json

import pytest

from calibadv_jax.data.row_files import read_rows
from experiments import two_passages

pytestmark = pytest.mark.medium  # of an experiment's program


def demonstration(name, searches, source="hotpotqa", passages=2):
    return {
        "id": name,
        "question": f"what is {name}?",
        "golden_answers": ["x"],
        "data_source": source,
        "supporting_ids": [str(number) for number in range(passages)],
        "turns": [{"text": "…"}] * (searches + 1),
    }


def test_only_questions_that_need_two_passages_are_chosen(tmp_path, capsys):
    kept = [demonstration(f"once {i}", 1) for i in range(230)]
    kept += [demonstration(f"twice {i}", 2, source="musique") for i in range(7)]
    others = [demonstration("thrice", 3), demonstration("single", 2, passages=1)]
    others += [demonstration("other", 2, source="popqa")]
    for name, rows in {"demos": kept + others, "test": others}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["select", str(tmp_path / "demos"), str(tmp_path / "test"), "--output", str(tmp_path)]
    assert two_passages.main(arguments) == 0
    assert "demonstrations.jsonl: 207 rows" in capsys.readouterr().out
    first = (tmp_path / "demonstrations.jsonl").read_bytes()
    chosen, questions, test = (
        [row for _, row in read_rows(tmp_path / f"{name}.jsonl")]
        for name in ("demonstrations", "questions", "test")
    )
    assert sum(len(row["turns"]) == 3 for row in chosen) == 7
    assert sum(len(row["turns"]) == 2 for row in chosen) == two_passages.ONE_SEARCH
    assert {row["id"] for row in questions} == {row["id"] for row in kept}
    assert not any("turns" in row for row in questions)
    assert [row["id"] for row in test] == ["thrice"]
    two_passages.main(arguments)
    assert (tmp_path / "demonstrations.jsonl").read_bytes() == first  # the draw is the same


def test_more_searches_and_fewer_demonstrations_with_one_can_be_chosen():
    rows = [demonstration(f"once {i}", 1) for i in range(5)]
    rows += [demonstration(f"more {i}", i) for i in (2, 3, 4)] + [demonstration("none", 0)]
    files = two_passages.select(rows, [], most_searches=3, one_search=2)
    assert sorted(len(row["turns"]) - 1 for row in files["demonstrations.jsonl"]) == [1, 1, 2, 3]
    assert [row["id"] for row in files["questions.jsonl"]][5:] == ["more 2", "more 3"]


def row(name, answers, searches, observations, **scores):
    turns = [
        {"kind": "search", "text": f"<search> {query} </search>", "observation": text}
        for query, text in zip(searches, observations, strict=True)
    ]
    turns.append({"kind": "answer", "text": "<answer> x </answer>", "observation": ""})
    scores = dict.fromkeys(two_passages.SCORES, 0.0) | {"searches": float(len(searches))} | scores
    question = {"id": name, "question": f"who is {name}?", "golden_answers": answers}
    return question | {"trajectories": [{"scores": scores, "turns": turns}]}


def test_measures_of_an_evaluation():
    rows = [
        row("ann", ["Rome"], ["Who is Ann?", "Ann Lee"], ["Ann Lee.", "She is from Rome."], f1=1.0),
        row("bob", ["Oslo"], ["bob smith"], ["Oslofjord"], f1=0.5),
        row("cat", ["no"], ["who is cat"], ["There is no cat."]),
        row("dan", ["Bonn"], [], []),
    ]
    for number, scored in enumerate(rows):
        scored["trajectories"][0]["scores"]["evidence"] = number / 4
    plain = row("eve", ["Rome"], ["eve"], ["Rome"], f1=1.0)  # it names no passages
    del plain["trajectories"][0]["scores"]["evidence"]
    measured = two_passages.measure([*rows, plain])
    assert measured["questions"] == "4"
    assert (measured["f1"], measured["evidence"]) == ("0.375", "0.375")
    assert (measured["searches"], measured["searched again"]) == ("1.000", "0.250")
    assert measured["answer returned"] == "0.333"  # of three; "no" stands in a text by chance
    assert measured["first query is the question"] == "0.667"  # of three that search


def test_an_evaluation_without_evidence_has_no_measures():
    plain = row("eve", ["Rome"], ["eve"], ["Rome"])
    del plain["trajectories"][0]["scores"]["evidence"]
    assert set(two_passages.measure([plain]).values()) == {"0", "-"}
