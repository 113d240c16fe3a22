"""calibadv compare: two evaluations of the same questions."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from disk_rig import refuses_full_disk
from evaluation_rig import QUESTIONS, Rig, Scripted
from rows_rig import write_rows

from calibadv_jax import cli
from calibadv_jax.evaluation.records import FIELDS


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    def evaluate(name, reply, questions=QUESTIONS, **sections):
        (tmp_path / name).mkdir()
        rig = Rig(tmp_path / name, monkeypatch)
        rig.questions = {"eval.jsonl": questions}
        rig(Scripted(reply), evaluate={"temperatures": [0.0, 1.0], "samples": 2} | sections)
        return rig.file(".json")

    return evaluate


@pytest.fixture
def pair(evaluate):
    """Two evaluations: the first policy knows a, the second one a and half of b; greedy and sampled."""

    def better(prompt, seed):
        return "yes" if any(f"Question: {existing}" in prompt for existing in ("a", "b 0", "b 1")) else "no"

    return evaluate("A", None), evaluate("B", better)


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the command; gives status, output, errors on one line, and the numbers that it wrote."""

    def call(*argv):
        file = tmp_path / "compare.json"
        file.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as stop:
            cli.calibadv(["compare", *map(str, argv), "--output", str(file)])
        out, error = capsys.readouterr()
        assert stop.value.code == 0 or (stop.value.code == 2 and error.count("\n") == 1)
        numbers = json.loads(file.read_text()) if file.exists() else {}
        return stop.value.code, out, " ".join(error.split()), numbers

    return call


def change_rows(path, change):
    """Rewrite the rows of an evaluation."""
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    write_rows(path.with_suffix(".jsonl"), *(change(number, row) for number, row in enumerate(rows)))


def test_table_and_the_numbers(pair, call):
    first, second = pair[0], pair[1].with_suffix(".jsonl")
    status, out, _, numbers = call(first, second)
    side_a, side_b, header, _, *lines = out.splitlines()
    assert status == 0 and (side_a, side_b) == (f"A: {first}", f"B: {second}")
    assert header.split()[:6] == ["temperature", "metric", "data", "questions", "A", "B"]
    assert "95% interval" in header and len(lines) == 2 * 3 * 4
    line = next(line.split() for line in lines if line.split()[:3] == ["0", "em", "b"])
    assert line[3:7] == ["4", "0.000", "0.500", "0.500"]
    result = numbers["differences"]["0"]["em"]
    assert result["a"]["difference"] == 0 and result["a"]["p_value"] == 1
    assert result["b"]["difference"] == 0.5
    assert result["b"]["p_value"] == 0.5  # two questions differ: 2 of the 4 exchanges are as far apart
    assert result["all"]["difference"] == result["average"]["difference"] == 0.25
    low, high = result["b"]["interval"]
    assert 0 <= low < 0.5 < high <= 1
    back = call(second, first)[-1]["differences"]["0"]["em"]["all"]  # a swap changes the sign only
    assert back["difference"] == -0.25 and back["p_value"] == result["all"]["p_value"]


def test_full_disk_is_refused(pair, small_disk, capsys):
    output = small_disk / "c.json"
    command = ["compare", *map(str, pair), "--output", str(output)]
    assert refuses_full_disk(small_disk, output, lambda: cli.calibadv(command), capsys)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"a": 29, "b": 1}, "fewer than 30 questions (a: 29, b: 1)"),
        ({"a": 12}, "fewer than 30 questions (all: 12, a: 12)"),
        ({"a": 30, "b": 30}, ""),
    ],
)
def test_few_questions_are_a_warning(tmp_path, call, numbers, words):
    ids = [(source, f"{source}{number}") for source, size in numbers.items() for number in range(size)]
    blank = dict.fromkeys(FIELDS, "") | {"temperature": "0", "scores": {"em": 1.0}}
    rows = [blank | {"data_source": source, "id": name} for source, name in ids]
    paths = [write_rows(tmp_path / f"{name}.jsonl", *rows) for name in "AB"]
    options = ["--metrics", "em", "--resamples", "50", "--confidence", "0.9"]
    status, out, error, _ = call(*paths, *options)
    assert status == 0 and ("fewer than" in error) == bool(words) and words in error
    assert "90% interval" in out and {line.split()[1] for line in out.splitlines()[4:]} == {"em"}


NO = [replace(question, golden_answers=("no",)) for question in QUESTIONS]


@pytest.mark.parametrize(
    ("changes", "words", "of_seeds"),
    [
        ({"questions": QUESTIONS[:-1]}, "1 differ, such as 'b3' of 'b'; evaluate both", "1 differ"),
        ({"questions": NO}, "8 differ, such as 'a0' of", "8 differ"),
        ({"temperatures": [0.5]}, "has temperatures 0, 1 and .*C/evaluation.json has 0.5", "every seed at"),
    ],
)
def test_other_questions_or_temperatures_are_refused(evaluate, call, changes, words, of_seeds):
    first, other = evaluate("A", None), evaluate("C", None, **changes)
    for argv, expected in (((first, other), words), ((first, f"{other},{first}"), of_seeds)):
        status, _, error, _ = call(*argv)
        assert status == 2 and re.search(expected, error)
    assert call(other, first)[0] == 2


def test_bad_arguments_are_one_line(evaluate, call, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    first = evaluate("A", None)
    for argv, words in (
        ([first, tmp_path / "none.jsonl"], "none.jsonl: no such file; give the .jsonl"),
        ([first, tmp_path / "empty.jsonl"], "no questions in it"),
        ([first, first, "--metrics", "em", "pass@2"], "no metric 'pass@2'; it has f1, em, cover_em, format"),
        ([first, first, "--resamples", "0"], "argument --resamples: 0: give 1 or more"),
        ([first, first, "--confidence", "95"], "argument --confidence: 95: give 0.001 or more and below 1"),
        ([first, f"{first},{first.with_suffix('.jsonl')}"], "names an evaluation twice"),
        ([first, f"{first},"], "give the .jsonl"),
        ([first], "required: B"),
    ):
        status, _, error, _ = call(*argv)
        assert status == 2 and words in error


def test_question_without_score_is_left_out_for_both(pair, call):
    change_rows(pair[0], lambda number, row: row | ({} if number else {"scores": {}}))
    for sides in (pair, pair[::-1]):
        assert call(*sides)[-1]["differences"]["0"]["em"]["a"]["questions"] == 3


def test_seeds_are_averaged_a_question_at_a_time(pair, evaluate, call):
    first, second = pair
    other = evaluate("C,c", lambda prompt, seed: "yes" if "Question: b" in prompt else "no")
    for order in (f"{second},{other}", f"{other},{second}"):
        numbers = call(first, order)[-1]
        results = numbers["differences"]["0"]["em"]
        a, b = SimpleNamespace(**results["a"]), SimpleNamespace(**results["b"])
        assert numbers["second"] == order
        # Of b the seeds know 2 and 4 of 4; a question still counts once. Of a the second seed knows nothing.
        assert (b.questions, b.second, b.difference) == (4, 0.75, 0.75)
        assert b.p_value == 0.125 and a.second == a.first / 2  # all of 4 differ: 2 of 16


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c2"}, "corpus_sha256 'c1' and 'c2'"),
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c1", "reranker": "m"}, "reranker None and 'm'"),
        ({"corpus_sha256": "c1"}, {}, ""),  # a policy that searched nothing
    ],
)
def test_other_retrievers_are_told(pair, call, first, second, words):
    for path, service in zip(pair, (first, second), strict=True):
        change_rows(path, lambda _, row, service=service: row | {"retriever": service})
    status, _, error, numbers = call(*pair)
    assert status == 0 and ("other retrievers searched for" in error) == bool(words) and words in error
    assert numbers["other_retrievers"] == bool(words)
