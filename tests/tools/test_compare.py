"""calibadv compare: two evaluations of the same questions."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from disk_rig import refuses_full_disk
from evaluation_rig import QUESTIONS, Rig, Scripted

from calibadv_jax import cli
from calibadv_jax.contrib.commands import compare
from calibadv_jax.evaluation.records import FIELDS


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two evaluations: the first policy knows a, the second one a and half of b; greedy and sampled."""

    def evaluate(name, reply, **sections):
        (tmp_path / name).mkdir()
        rig = Rig(tmp_path / name, monkeypatch)
        rig.questions = {"eval.jsonl": sections.pop("questions", QUESTIONS)}
        rig(Scripted(reply), evaluate={"temperatures": [0.0, 1.0], "samples": 2} | sections)
        return rig.file(".json")

    def better(prompt, seed):
        return "yes" if any(f"Question: {existing}" in prompt for existing in ("a", "b 0", "b 1")) else "no"

    return evaluate("A", None), evaluate("B", better), evaluate


def call(*argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["compare", *map(str, argv)])
    return stop.value.code, *capsys.readouterr()


def test_table_and_the_numbers(pair, capsys, tmp_path):
    first, second, _ = pair
    status, out, _ = call(first, second.with_suffix(".jsonl"), "--output", tmp_path / "c.json", capsys=capsys)
    assert status == 0
    side_a, side_b, header, _, *lines = out.splitlines()
    assert side_a == f"A: {first}" and side_b == f"B: {second.with_suffix('.jsonl')}"
    assert header.split()[:6] == ["temperature", "metric", "data", "questions", "A", "B"]
    assert "95% interval" in header and len(lines) == 2 * 3 * 4
    line = next(line.split() for line in lines if line.split()[:3] == ["0", "em", "b"])
    assert line[3:7] == ["4", "0.000", "0.500", "0.500"]
    result = json.loads((tmp_path / "c.json").read_text())["differences"]["0"]["em"]
    assert result["a"]["difference"] == 0 and result["a"]["p_value"] == 1
    assert result["b"]["difference"] == 0.5
    assert result["b"]["p_value"] == 0.5  # two questions differ: 2 of the 4 exchanges are as far apart
    assert result["all"]["difference"] == result["average"]["difference"] == 0.25
    low, high = result["b"]["interval"]
    assert 0 <= low < 0.5 < high <= 1


def test_full_disk_is_refused(pair, small_disk, capsys):
    output = small_disk / "c.json"
    command = ["compare", *map(str, pair[:2]), "--output", str(output)]
    assert refuses_full_disk(small_disk, output, lambda: cli.calibadv(command), capsys)


def test_metrics_and_confidence_are_chosen(pair, capsys):
    first, second, _ = pair
    options = ["--metrics", "pass@2", "searches", "--confidence", "0.9"]
    status, _, error = call(first, second, *options, capsys=capsys)
    assert (status, error.count("\n")) == (2, 1)
    assert "no metric 'pass@2'; it has f1, em, cover_em, format, answered, searches, tokens" in error
    status, out, _ = call(first, second, "--metrics", "tokens", "--confidence", "0.9", capsys=capsys)
    assert status == 0 and "90% interval" in out
    assert {line.split()[1] for line in out.splitlines()[4:]} == {"tokens"}


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"a": 29, "b": 1}, "fewer than 30 questions (a: 29, b: 1)"),
        ({"a": 30, "b": 12}, "fewer than 30 questions (b: 12)"),
        ({"a": 12}, "fewer than 30 questions (all: 12, a: 12)"),
        ({"a": 30, "b": 30}, ""),
    ],
)
def test_few_questions_are_a_warning(tmp_path, capsys, numbers, words):
    paths = [tmp_path / f"{name}.jsonl" for name in "AB"]
    for path in paths:
        rows = [
            dict.fromkeys(FIELDS, "")
            | {"temperature": "0", "data_source": source, "id": f"{source}{number}"}
            | {"scores": {"em": float(number % 2)}}
            for source, size in numbers.items()
            for number in range(size)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, error = call(*paths, "--metrics", "em", "--resamples", "50", capsys=capsys)
    assert status == 0 and ("fewer than" in error) == bool(words) and words in " ".join(error.split())


def test_swap_changes_the_sign_only(pair):
    first, second, _ = pair
    arguments = argparse.Namespace(first=first, second=second, resamples=500, confidence=0.95)
    a, b = (compare._load(path)["0"] for path in (first, second))
    forth = dict(compare._compare(arguments, "em", a, b))["all"]
    back = dict(compare._compare(arguments, "em", b, a))["all"]
    assert back.difference == -forth.difference and back.p_value == forth.p_value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"questions": QUESTIONS[:-1]}, "1 differ, such as 'b3' of 'b'; evaluate both to the end"),
        ({"questions": [replace(q, golden_answers=("no",)) for q in QUESTIONS]}, "8 differ, such as 'a0' of"),
        ({"temperatures": [0.5]}, "has temperatures 0, 1 and .*C/evaluation.json has 0.5: evaluate both"),
    ],
)
def test_other_questions_or_temperatures_are_refused(pair, capsys, changes, words):
    first, _, evaluate = pair
    other = evaluate("C", None, **changes)
    status, _, error = call(first, other, capsys=capsys)
    assert status == 2 and error.count("\n") == 1 and re.search(words, error)
    assert call(other, first, capsys=capsys)[0] == call(first, f"{other},{first}", capsys=capsys)[0] == 2


def test_bad_arguments_are_one_line(pair, capsys, tmp_path):
    first, second, _ = pair
    (tmp_path / "empty.jsonl").write_text("")
    for argv, words in (
        ([first, tmp_path / "none.jsonl"], "none.jsonl: no such file; give the .jsonl"),
        ([first, tmp_path / "empty.jsonl"], "no questions in it"),
        ([first, second, "--resamples", "0"], "argument --resamples: 0: give 1 or more"),
        ([first, second, "--confidence", "95"], "argument --confidence: 95: give 0.001 or more and below 1"),
        ([first], "required: B"),
    ):
        status, _, error = call(*argv, capsys=capsys)
        assert status == 2 and error.count("\n") == 1 and words in error


def test_question_without_score_is_left_out_for_both(pair):
    first, second, _ = pair
    path = Path(first).with_suffix(".jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["scores"] = {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = argparse.Namespace(first=str(first), second=str(second), resamples=100, confidence=0.95)
    a, b = (compare._load(each)["0"] for each in (first, second))
    for sides in ((a, b), (b, a)):
        assert dict(compare._compare(arguments, "em", *sides))["a"].questions == 3


def test_seeds_are_averaged_a_question_at_a_time(pair, capsys, tmp_path):
    first, second, evaluate = pair
    other = evaluate("C", lambda prompt, seed: "yes" if "Question: b" in prompt else "no")
    for order in (f"{second},{other}", f"{other},{second}"):
        status, *_ = call(first, order, "--output", tmp_path / "c.json", capsys=capsys)
        assert status == 0
        numbers = json.loads((tmp_path / "c.json").read_text())
        result = numbers["differences"]["0"]["em"]
        assert numbers["second"] == order
        # Of b the seeds know 2 and 4 of 4; a question still counts once. Of a the second seed knows nothing.
        assert result["b"]["questions"] == 4 and result["b"]["second"] == 0.75
        assert (
            result["b"]["difference"] == 0.75 and result["b"]["p_value"] == 0.125
        )  # all of 4 differ: 2 of 16
        assert result["a"]["second"] == result["a"]["first"] / 2


def test_what_are_no_seeds_is_one_line(pair, capsys):
    first, second, evaluate = pair
    fewer = evaluate("C", None, questions=QUESTIONS[:-1])
    cold = evaluate("D", None, temperatures=[0.0])
    for seeds, words in (
        (f"{second},{second.with_suffix('.jsonl')}", "names an evaluation twice"),
        (f"{second},{fewer}", "did not answer the same questions at temperature 0: 1 differ"),
        (f"{second},{cold}", "evaluate every seed at the same temperatures"),
        (f"{second},", "give the .jsonl"),
    ):
        status, _, error = call(first, seeds, capsys=capsys)
        assert status == 2 and error.count("\n") == 1 and words in error


def test_path_may_hold_a_comma(pair, capsys, tmp_path):
    first, second, _ = pair
    folder = tmp_path / "grpo,seed-0"
    folder.mkdir()
    for kind in (".json", ".jsonl"):
        (folder / f"e{kind}").write_bytes(second.with_suffix(kind).read_bytes())
    assert call(first, folder / "e.json", capsys=capsys)[0] == 0
    assert call(first, f"{folder / 'e.jsonl'},{first}", capsys=capsys)[0] == 0
    (folder / "e.json").unlink()  # the rows are what is read
    assert call(first, folder / "e.json", capsys=capsys)[0] == 0


def searched_by(path, **output):
    """The evaluation's rows, as another retriever's."""
    path = Path(path).with_suffix(".jsonl")
    lines = [json.loads(line) | {"retriever": output} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c2"}, "corpus_sha256 'c1' and 'c2'"),
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c1", "reranker": "m"}, "reranker None and 'm'"),
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c1"}, ""),
        ({"corpus_sha256": "c1"}, {}, ""),  # a policy that searched nothing
    ],
)
def test_other_retrievers_are_told(pair, capsys, tmp_path, first, second, words):
    paths = pair[:2]
    for path, output in zip(paths, (first, second), strict=True):
        searched_by(path, **output)
    status, out, error = call(*paths, "--output", tmp_path / "c.json", capsys=capsys)
    assert status == 0 and out
    shown = " ".join(error.split())
    assert ("other retrievers searched for" in shown) == bool(words) and words in shown
    assert json.loads((tmp_path / "c.json").read_text())["other_retrievers"] == bool(words)
