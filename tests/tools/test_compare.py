"""calibadv compare: two evaluations of the same questions."""

from __future__ import annotations

import json

import pytest
from disk_rig import refuses_full_disk
from rows_rig import write_rows

from calibadv_jax import cli
from calibadv_jax.evaluation.records import FIELDS

IDS = [f"{source}{number}" for source in "ab" for number in range(4)]  # the letter is the data source


@pytest.fixture
def evaluate(tmp_path):
    """Writes the rows of an evaluation: questions of `right` score 1, of `unscored` nothing, others 0."""

    def evaluate(name, right, ids=IDS, temperatures=("0", "1"), unscored=(), **fields):
        rows = []
        for temperature in temperatures:
            for name_of_question in ids:
                score = dict.fromkeys(("f1", "em", "cover_em"), float(name_of_question in right))
                row = dict.fromkeys(FIELDS, "") | {"temperature": temperature, "id": name_of_question}
                row["scores"] = {} if name_of_question in unscored else score
                rows.append(row | {"data_source": name_of_question[0]} | fields)
        return write_rows(tmp_path / f"{name}.jsonl", *rows)

    return evaluate


@pytest.fixture
def pair(evaluate):
    """Two evaluations: the first policy knows a, the second one a and half of b; greedy and sampled."""
    return evaluate("A", IDS[:4]), evaluate("B", IDS[:6])


@pytest.fixture
def call(tmp_path, capsys):
    """Runs the command; gives status, output, errors on one line, and the numbers that it wrote."""

    def call(*argv):
        file = tmp_path / "comparisons/compare.json"
        file.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as stop:
            cli.calibadv(["compare", *map(str, argv), "--output", str(file)])
        out, error = capsys.readouterr()
        assert stop.value.code == 0 or (stop.value.code == 2 and error.count("\n") == 1)
        numbers = json.loads(file.read_text()) if file.exists() else {}
        return stop.value.code, out, " ".join(error.split()), numbers

    return call


def test_table_and_the_numbers(pair, call):
    first, second = pair[0].with_suffix(".json"), pair[1]
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


SCORES = {"f1": 0.5, "em": 0.0, "cover_em": 1.0, "format": 1.0, "answered": 1.0, "searches": 2, "tokens": 30}


def test_metrics_are_chosen(evaluate, call):
    first, second = evaluate("A", IDS, scores=SCORES), evaluate("B", IDS, scores=SCORES)
    status, out, *_ = call(first, second, "--metrics", "tokens", "--confidence", "0.9")
    assert status == 0 and "90% interval" in out
    assert {line.split()[1] for line in out.splitlines()[4:]} == {"tokens"}
    status, _, error, _ = call(first, second, "--metrics", "pass@2", "searches")
    assert status == 2
    assert "no metric 'pass@2'; it has f1, em, cover_em, format, answered, searches, tokens" in error


def test_path_of_one_evaluation_may_hold_a_comma(pair, evaluate, call):
    rows = evaluate("grpo,seed-0/C", IDS[4:])
    for path in (rows, rows.with_suffix(".json"), f"{rows},{pair[1]}"):
        assert call(pair[0], path)[0] == 0


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
def test_few_questions_are_a_warning(evaluate, call, numbers, words):
    ids = [f"{source}{number}" for source, size in numbers.items() for number in range(size)]
    paths = [evaluate(name, ids, ids, ["0"]) for name in "AB"]
    options = ["--metrics", "em", "--resamples", "50", "--confidence", "0.9"]
    status, out, error, _ = call(*paths, *options)
    assert status == 0 and ("fewer than" in error) == bool(words) and words in error
    assert "90% interval" in out and {line.split()[1] for line in out.splitlines()[4:]} == {"em"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": IDS[:-1]}, "2 questions differ, such as 'b3' of 'b' at temperature 0;"),
        ({"golden_answers": ["no"]}, "16 questions differ, such as 'a0' of 'a' at temperature 0;"),
        ({"question": "other"}, "16 questions differ, such as 'a0' of 'a' at temperature 0;"),
        ({"temperatures": ["0"]}, "8 questions differ, such as 'a0' of 'a' at temperature 1;"),
    ],
)
def test_other_questions_or_temperatures_are_refused(evaluate, call, changes, words):
    first, other = evaluate("A", IDS), evaluate("C", IDS, **changes)
    for argv in ((first, other), (other, first), (first, f"{other},{first}"), (f"{first},{other}", first)):
        status, _, error, _ = call(*argv)
        assert status == 2 and words in error and "C.jsonl" in error


def test_bad_arguments_are_one_line(pair, call, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    first = pair[0].with_suffix(".json")
    for argv, words in (
        ([first, tmp_path / "none.jsonl"], "none.jsonl: no such file; give the .jsonl"),
        ([first, tmp_path / "empty.jsonl"], "no questions in it"),
        ([first, first, "--metrics", "em", "pass@2"], "no metric 'pass@2'; it has f1, em, cover_em"),
        ([first, first, "--resamples", "0"], "argument --resamples: 0: give 1 or more"),
        ([first, first, "--confidence", "95"], "argument --confidence: 95: give 0.001 or more and below 1"),
        ([first, f"{first},{pair[0]}"], "names an evaluation twice"),
        ([first, f"{first},"], "give the .jsonl"),
        ([first], "required: B"),
    ):
        status, _, error, _ = call(*argv)
        assert status == 2 and words in error


def test_question_without_score_is_left_out_for_both(pair, evaluate, call):
    unscored = evaluate("C", IDS[:4], unscored=["a0"])
    for sides in ((unscored, pair[1]), (pair[1], unscored)):
        assert call(*sides)[-1]["differences"]["0"]["em"]["a"]["questions"] == 3


def test_seeds_are_averaged_a_question_at_a_time(pair, evaluate, call):
    first, second = pair
    other = evaluate("lr=1,seed=2/C", IDS[4:])  # this comma separates no evaluations
    for order in (f"{second},{other}", f"{other},{second}"):
        numbers = call(first, order)[-1]
        results = numbers["differences"]["0"]["em"]
        assert numbers["second"] == order
        # Of b the seeds know 2 and 4 of 4; a question still counts once. Of a the second seed knows nothing.
        assert [results["b"][name] for name in ("questions", "second", "difference")] == [4, 0.75, 0.75]
        assert results["b"]["p_value"] == 0.125 and results["a"]["second"] == 0.5  # all of 4 differ: 2 of 16


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c2"}, True),
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c1", "reranker": "m"}, True),
        ({"corpus_sha256": "c1"}, {"corpus_sha256": "c1"}, False),
        ({"corpus_sha256": "c1"}, {}, False),  # a policy that searched nothing
    ],
)
def test_other_retrievers_are_a_warning(evaluate, call, first, second, differs):
    paths = [evaluate(name, IDS, retriever=service) for name, service in (("A", first), ("B", second))]
    status, _, error, numbers = call(*paths)
    assert status == 0 and ("different retrievers searched" in error) == differs
    assert numbers["other_retrievers"] == differs


def test_fields_of_different_retrievers_are_named(evaluate, call):
    first = {"corpus_sha256": "c1", "documents": 10, "encoder": "e5"}
    second = {"corpus_sha256": "c2", "documents": 10, "reranker": "m"}
    path = evaluate("A", IDS, retriever=first)
    searchless = evaluate("B", IDS)
    other_path = evaluate("C", IDS, retriever=second)
    _, _, error, _ = call(f"{path},{searchless}", other_path)
    fields = "corpus_sha256, encoder, reranker"
    assert f"different retrievers searched: {fields} of {path} and of {other_path} differ" in error
