"""Rows of the per-question file and their means; intervals, paired test and pass@k beside enumerations."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from rows_rig import write_rows
from scipy.stats import bootstrap

from calibadv_jax.commands import evaluate
from calibadv_jax.config import Config, parse_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.evaluation import score_tables
from calibadv_jax.evaluation.records import (
    RowFile,
    evaluation_identity,
    make_row,
    pass_at_k,
    question_scores,
    read_scores,
    row_key,
)
from calibadv_jax.evaluation.score_tables import (
    ScoreReport,
    bootstrap_interval,
    bootstrap_intervals_of_sums,
    metric_names,
    stratified_mean,
    summarise,
)
from calibadv_jax.evaluation.statistics import compare_paired
from calibadv_jax.metrics.console import Console

QUESTION = Question("1", "Who?", ("Ann",), "nq")


def attempt(em, **more):
    return {"f1": em / 2, "em": em} | more


def test_scores_of_a_question_are_means_and_estimates():
    assert question_scores([attempt(1.0)]) == {"f1": 0.5, "em": 1.0}
    scores = question_scores([attempt(em) for em in (1.0, 0.0, 0.0, 1.0, 0.0, 0.0)])
    assert scores.pop("em") == scores.pop("mean@6") == pytest.approx(1 / 3)
    assert scores.pop("f1") == pytest.approx(1 / 6)
    assert scores == pytest.approx({"pass@2": 1 - 6 / 15, "pass@4": 1 - 1 / 15, "pass@6": 1.0})
    assert question_scores([]) == {}
    assert question_scores([attempt(0.0) | {"f1": 0.9}] * 2)["pass@2"] == 0  # almost right is no pass


@pytest.mark.parametrize("method", ["agent", "direct"])
def test_row_has_scores_of_finished_attempts_alone(method):
    lost, right, wrong = (Trajectory(QUESTION, np.zeros(4, np.int32), [], index) for index in range(3))
    lost.error, lost.metrics = "retriever: gone", {"em": 1.0}
    right.metrics, wrong.metrics = {"em": 1.0, "format": 1.0}, {"em": 0.0, "format": 1.0}
    asked = replace(QUESTION, text="with passages")
    scored = make_row("e", 0.5, QUESTION, Group(asked, [right, wrong], [lost]), method)
    assert [attempt["error"] for attempt in scored["trajectories"]] == ["retriever: gone", None, None]
    assert [attempt["scores"].get("em") for attempt in scored["trajectories"]] == [None, 1.0, 0.0]
    assert (scored["scores"]["em"], scored["scores"]["pass@2"]) == (0.5, 1.0)
    assert ("format" in scored["scores"]) == (method == "agent")
    assert (row_key(scored), scored["question"]) == (("0.5", "nq", "1"), "Who?")


def row(number, source="nq", temperature="0", evaluation="e", scores=None, error=None):
    return {
        "evaluation": evaluation,
        "content": "c",
        "temperature": temperature,
        "data_source": source,
        "id": str(number),
        "question": "Who?",
        "golden_answers": ["Ann"],
        "scores": {"em": 1.0} if scores is None else scores,
        "trajectories": [{"error": error, "turns": ["long"]}],
    }


def test_transcripts_stay_on_disk(tmp_path):
    path = tmp_path / "e.jsonl"
    file = RowFile(path, "e", [QUESTION])
    file.start()
    for number in (1, 2, 3):
        file.add(row(number, scores={"em": 0.0}))
        file.add(row(number))  # the newest row of a question counts
    assert all(scored["trajectories"] == [{"error": None}] for scored in file.rows.values())
    order = [row_key(row(number)) for number in (3, 1)]
    rows = [(scored["id"], scored["scores"]["em"]) for scored in file.finish(order)]
    assert rows == [("3", 1.0), ("1", 1.0)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row(3), row(1)]
    assert [scored["id"] for scored in read_scores(path)] == ["3", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["e.jsonl"]


def test_rows_of_another_evaluation_are_counted(tmp_path):
    rows = [row(number, evaluation=name) for number, name in enumerate(("other", "e", "third"))]
    path = write_rows(tmp_path / "e.jsonl", *rows)
    assert RowFile(path, "e", [QUESTION]).num_foreign_rows == 2
    assert RowFile(tmp_path / "absent.jsonl", "e", [QUESTION]).num_foreign_rows == 0


def test_damaged_line_is_named(tmp_path):
    path = write_rows(tmp_path / "e.jsonl", row(1), "{", row(2))
    with pytest.raises(UserError, match=r"e.jsonl:2: not valid JSON .*; remove the file, or the line"):
        RowFile(path, "e", [QUESTION])


def test_average_weighs_sources_all_weighs_questions():
    rows = [row(n, scores={"em": 1.0}) for n in range(3)] + [row(9, "hotpotqa", scores={"em": 0.0})]
    means = summarise(rows).means["0"]
    assert (means["all"]["em"], means["average"]["em"]) == (0.75, 0.5)
    assert list(means) == ["all", "average", "nq", "hotpotqa"]
    assert list(summarise(rows[:3]).means["0"]) == ["all", "nq"]


def test_question_without_pass_at_k_is_skipped():
    rows = [row(1, scores={"em": 0.5, "pass@2": 1.0}), row(2, scores={"em": 0.0})]
    summary = summarise(rows).means["0"]["nq"]
    assert (summary["em"], summary["pass@2"], summary["questions"]) == (0.25, 1.0, 2)


def test_metrics_come_in_one_order():
    names = metric_names([row(1, scores=dict.fromkeys(("pass@2", "tokens", "mean@2", "em", "f1"), 1))])
    assert names == ["f1", "em", "tokens", "pass@2", "mean@2"]


def test_intervals_resample_within_each_data_source():
    scores = {"nq": [1.0, 0.0, 0.5, 0.25], "hotpotqa": [0.0, 0.75]}
    rows = [row(n, source, scores={"em": em}) for source, some in scores.items() for n, em in enumerate(some)]
    summary = summarise(rows, resamples=500, confidence=0.9).intervals["0"]
    arrays = {source: np.array(some) for source, some in scores.items()}
    assert summary["average"]["em"] == bootstrap_interval(list(arrays.values()), 0.9, 500)
    assert summary["nq"]["em"] == bootstrap_interval([arrays["nq"]], 0.9, 500)
    assert summary["all"]["em"] == bootstrap_interval([np.concatenate(list(arrays.values()))], 0.9, 500)
    assert summary["all"]["em"] != summary["average"]["em"]


def identity_of(hashes=None, texts=("Who?",), **sections):
    questions = [replace(QUESTION, text=text) for text in texts]
    return evaluation_identity(
        parse_config(json.dumps(sections), "config.yaml"), {}, {}, questions, hashes or {}
    )


def vllm(**sampler):
    return {"sampler": {"name": "vllm"} | sampler, "loss": {"importance_cap": 2.0}}


def template(**arguments):
    return {"prompt": {"chat_template_kwargs": arguments}}


def tools(tools_hash="a", **access):
    return {"tools": [{"name": "search"}, {"name": "access"} | access], "hashes": {"tools": tools_hash}}


def judged(reward=(), prompt_hash="a", **judge):
    judge = {"url": "http://127.0.0.1:1/v1", "model": "small"} | judge
    return {"reward": {"judge": judge, **dict(reward)}, "hashes": {"judge": prompt_hash}}


def method(name, *texts):
    return {"evaluate": {"method": name}, "texts": texts}


@pytest.mark.parametrize(
    ("first", "second", "are_equal"),
    [
        ({}, {"run": {"seed": 1}}, False),
        ({}, {"rollout": {"max_searches": 1}}, False),
        ({}, {"rollout": {"max_concurrency": 2}}, True),
        ({}, {"retriever": {"topk": 5}}, False),
        ({}, {"retriever": {"index": "elsewhere", "patience": 3}}, True),
        ({}, {"prompt": {"template": "Tell: {question}"}}, False),
        (method("agent", "Who?"), method("empty_retriever", "Who?"), False),
        (vllm(), vllm(dtype="float32"), False),
        (vllm(), vllm(dtype="bfloat16"), True),  # the default
        (template(), template(enable_thinking=False), False),
        (template(enable_thinking=False), template(enable_thinking=True), False),
        ({}, tools(), False),
        (tools(), tools("b"), False),
        (tools(), tools(max_length=100), False),
        (tools(), tools(timeout=1.0), True),
        (judged(), judged({"answer": {"f1": 0.5, "judge": 0.5}}), False),
        (judged(), judged({"answer": "em"}), False),
        (judged(), judged(model="large"), False),
        (judged(), judged(max_tokens=10), False),
        (judged(), judged(prompt_hash="b"), False),
        (judged(), judged(url="http://127.0.0.1:2/v1", timeout=1.0, patience=1.0, max_concurrency=2), True),
        (judged(), judged({"shuffle": True}), True),
        (method("random_documents", "Who?"), method("random_documents", "Who?", "Where?"), False),
        (method("agent", "Who?"), method("agent", "Who?", "Where?"), True),  # each is answered by itself
    ],
)
def test_evaluation_is_identified_by_answers_inputs(first, second, are_equal):
    assert (identity_of(**first) == identity_of(**second)) == are_equal


def test_warning_of_missing_answers_stands_above_the_table(monkeypatch):
    scores = {"f1": 0.0, "questions": 3.0, "trajectories": 3.0, "failed": 0.0, "answered": 0.0}
    lines = []
    monkeypatch.setattr(evaluate, "choose_policy", lambda config: "a policy")
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda *_: ScoreReport({"1": {"all": scores}}))
    monkeypatch.setattr(Console, "warn", lambda _, text: lines.append(text))
    monkeypatch.setattr(Console, "say", lambda _, text: lines.append(text))
    evaluate.run(Config())
    policy, warning, table = lines
    assert policy == "policy: a policy"
    assert "transcripts are in" in warning
    assert table.startswith("temperature  data")


def test_evaluation_without_answers_is_a_warning(monkeypatch):
    scores, lines = {"f1": 0.0, "questions": 3.0, "trajectories": 3.0, "failed": 0.0}, []
    answered = {"0": {}, "0.5": {"answered": 0.1}, "1": {"answered": 0.0}}
    report = ScoreReport({temperature: {"all": scores | share} for temperature, share in answered.items()})
    monkeypatch.setattr(evaluate, "choose_policy", lambda config: "a policy")
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda *_: report)
    monkeypatch.setattr(Console, "warn", lambda _, text: lines.append(text))
    evaluate.run(Config())
    (line,) = lines
    assert line.startswith("temperature 1: no trajectory has an answer") and "calibadv sft" in line


FIRST = np.array([1.0, 0.0, 0.5, 0.2, 0.9, 0.4])
SECOND = np.array([0.2, 0.8, 0.6])


@pytest.mark.parametrize("elements", [score_tables.RESAMPLED_ELEMENTS, 70])  # 70: eleven resamples at a time
def test_interval_is_that_of_scipy(monkeypatch, elements):
    monkeypatch.setattr(score_tables, "RESAMPLED_ELEMENTS", elements)
    expected = bootstrap(
        (FIRST, SECOND),
        lambda first, second, axis: (np.mean(first, axis=axis) + np.mean(second, axis=axis)) / 2,
        n_resamples=500,
        batch=elements // len(FIRST),
        vectorized=True,
        axis=-1,
        confidence_level=0.9,
        method="percentile",
        rng=random_state(0, 0, "bootstrap"),
    ).confidence_interval
    assert bootstrap_interval([FIRST, SECOND], 0.9, 500) == pytest.approx(
        (expected.low, expected.high), rel=1e-14
    )


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_interval_is_that_of_all_resamples(confidence):
    means = means_of_sources(resamples, FIRST)
    bounds = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    assert bootstrap_interval([FIRST], confidence, 40_000) == pytest.approx(tuple(bounds), abs=0.01)


@pytest.mark.medium
def test_interval_of_an_average_resamples_within_each_data_source():
    bounds = np.quantile(means_of_sources(resamples, FIRST, SECOND), [0.025, 0.975])
    assert bootstrap_interval([FIRST, SECOND], 0.95, 40_000) == pytest.approx(tuple(bounds), abs=0.01)
    assert stratified_mean([FIRST, SECOND]) == pytest.approx((FIRST.mean() + SECOND.mean()) / 2)


def test_interval_of_sums_resamples_rows():
    """A ratio of sums, such as a share of all blame, over every one of the N^N resamples of the rows."""
    sums = np.stack([FIRST, 1 + np.arange(len(FIRST))], axis=1)
    every = np.array([np.sum(rows, axis=0) for rows in itertools.product(sums, repeat=len(sums))])
    expected = np.quantile(every[:, 0] / every[:, 1], [0.1, 0.9])

    def ratio(drawn):
        return drawn[:, :1] / drawn[:, 1:]

    bounds = bootstrap_intervals_of_sums(sums, ratio, 0.8, 40_000)
    assert bounds.shape == (1, 2) and bounds[0] == pytest.approx(expected, abs=0.01)


def test_interval_is_repeatable_and_needs_two_questions():
    assert bootstrap_interval([FIRST], 0.95, 100) == bootstrap_interval([FIRST], 0.95, 100)
    assert bootstrap_interval([FIRST, SECOND[:1]], 0.95, 100) is None
    assert bootstrap_interval([FIRST], 0.95, 0) is None
    assert bootstrap_interval([np.ones(5)], 0.95, 100) == (1, 1)


def means_of_sources(choices, *per_source):
    """The mean over the data sources of their means, for every combination of the choices in each."""
    means = [np.array([np.mean(chosen) for chosen in choices(values)]) for values in per_source]
    return np.mean(np.meshgrid(*means), axis=0).ravel()


def resamples(values):
    return itertools.product(values, repeat=len(values))


def exchanges(differences):
    return np.array(list(itertools.product([1, -1], repeat=len(differences)))) * differences


@pytest.mark.medium
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([FIRST], [np.array([0.0, 0.0, 0.1, 0.3, 0.5, 0.0])]),  # one question is equal for both
        ([FIRST, SECOND], [FIRST[::-1] - 0.3, SECOND + 0.5]),  # data sources count alike
    ],
    ids=["one source", "two sources"],
)
def test_paired_comparison_equals_enumeration(first, second):
    differences = [b - a for a, b in zip(first, second, strict=True)]
    means = [np.mean([values.mean() for values in strata]) for strata in (first, second, differences)]
    compared = compare_paired(first, second, 0.95, 10_000)
    assert compared.questions == sum(map(len, first))
    assert [compared.first, compared.second, compared.difference] == pytest.approx(means)
    is_as_far = np.abs(means_of_sources(exchanges, *differences)) >= abs(means[2]) - 1e-9
    assert 0.05 < compared.p_value < 0.95 and compared.p_value == pytest.approx(is_as_far.mean())
    bounds = np.quantile(means_of_sources(resamples, *differences), [0.025, 0.975])
    assert compare_paired(first, second, 0.95, 40_000).interval == pytest.approx(tuple(bounds), abs=0.01)


def test_average_is_tested_with_equal_weights_of_data_sources():
    first, second = [FIRST, SECOND], [FIRST[::-1] - 0.3, SECOND + 0.5]
    apart = compare_paired(first, second, 0.95, 10_000)
    together = compare_paired([np.concatenate(first)], [np.concatenate(second)], 0.95, 10_000)
    assert together.p_value != pytest.approx(apart.p_value)


def test_more_questions_of_one_difference_make_it_surer():
    """The unit is the question: a narrower interval comes from more of them."""
    few, many = (
        compare_paired([np.zeros(count)], [np.tile([1.0, -0.5], count // 2)], 0.95, 2000)
        for count in (20, 200)
    )
    assert many.interval[1] - many.interval[0] < (few.interval[1] - few.interval[0]) / 2
    assert many.p_value < few.p_value


def test_many_questions_are_exchanged_at_random():
    rng = np.random.default_rng(0)
    first = rng.random(400)
    same, better = first + rng.normal(0, 0.3, 400), first + rng.normal(0.1, 0.3, 400)
    least = 2 / (999 + 1)
    assert compare_paired([first], [better], 0.95, 999).p_value == pytest.approx(least)
    compared, again = (compare_paired([first], [same], 0.95, 999) for _ in "12")
    assert compared.p_value > 0.05 and compared == again


def test_one_question_that_differs_says_nothing():
    compared = compare_paired([FIRST], [FIRST + [0.5, 0, 0, 0, 0, 0]], 0.95, 100)
    assert compared.difference > 0 and compared.p_value == 1.0
    compared = compare_paired([FIRST], [FIRST.copy()], 0.95, 100)
    assert (compared.difference, compared.interval, compared.p_value) == (0, (0, 0), 1)


@pytest.mark.parametrize("samples", [1, 3, 6])
def test_pass_at_k_equals_share_of_choices(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        attempts = [1] * correct + [0] * (samples - correct)
        choices = [any(sample) for sample in itertools.combinations(attempts, k)]
        assert pass_at_k(samples, correct, k) == pytest.approx(np.mean(choices))
