"""Rows of the per-question file: scores of a question, what is read back, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from calibadv_jax.config import (
    Config,
    EvaluateConfig,
    JudgeConfig,
    LossConfig,
    PromptConfig,
    RewardConfig,
    SamplerConfig,
    ToolConfig,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.evaluation.intervals import interval
from calibadv_jax.evaluation.records import RowFile, identity, key_of, question_scores, read_scores
from calibadv_jax.evaluation.report import metric_names, summarise

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


def test_almost_right_is_not_a_pass():
    assert question_scores([attempt(0.0) | {"f1": 0.9}] * 2)["pass@2"] == 0


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
        file.add(row(number))
    assert all(one["trajectories"] == [{"error": None}] for one in file.rows.values())
    order = [key_of(row(number)) for number in (3, 1)]
    assert [one["id"] for one in file.finish(order)] == ["3", "1"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row(3), row(1)]
    assert [one["id"] for one in read_scores(path)] == ["3", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["e.jsonl"]


def test_a_row_that_is_asked_again_is_the_one_that_counts(tmp_path):
    file = RowFile(tmp_path / "e.jsonl", "e", [QUESTION])
    file.start()
    file.add(row(1, scores={"em": 0.0}))
    file.add(row(1, scores={"em": 1.0}))
    assert file.finish([key_of(row(1))])[0]["scores"] == {"em": 1.0}
    assert next(iter(read_scores(tmp_path / "e.jsonl")))["scores"] == {"em": 1.0}


def test_lines_of_another_evaluation_are_counted(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text("".join(json.dumps(row(n, evaluation=name)) + "\n" for n, name in enumerate("xey")))
    assert RowFile(path, "e", [QUESTION]).others == 2


def test_a_line_that_is_damaged_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps(row(1)) + "\n{\n" + json.dumps(row(2)) + "\n")
    with pytest.raises(UserError, match=r"e.jsonl:2: not valid JSON .*; remove the file, or the line"):
        RowFile(path, "e", [QUESTION])


def test_an_average_weighs_data_sources_alike_and_all_weighs_questions():
    rows = [row(n, scores={"em": 1.0}) for n in range(3)] + [row(9, "hotpotqa", scores={"em": 0.0})]
    means = summarise(rows).means["0"]
    assert (means["all"]["em"], means["average"]["em"]) == (0.75, 0.5)
    assert list(means) == ["all", "average", "nq", "hotpotqa"]
    assert list(summarise(rows[:3]).means["0"]) == ["all", "nq"]


def test_a_question_without_pass_at_k_is_left_out_of_it():
    rows = [row(1, scores={"em": 0.5, "pass@2": 1.0}), row(2, scores={"em": 0.0})]
    found = summarise(rows).means["0"]["nq"]
    assert (found["em"], found["pass@2"], found["questions"]) == (0.25, 1.0, 2)


def test_metrics_come_in_one_order():
    assert metric_names([row(1, scores={"pass@2": 1, "tokens": 1, "mean@2": 1, "em": 1, "f1": 1})]) == [
        "f1", "em", "tokens", "pass@2", "mean@2"
    ]  # fmt: skip


def test_intervals_resample_questions_and_for_the_average_within_each_data_source():
    scores = {"nq": [1.0, 0.0, 0.5, 0.25], "hotpotqa": [0.0, 0.75]}
    rows = [row(n, source, scores={"em": em}) for source, some in scores.items() for n, em in enumerate(some)]
    found = summarise(rows, resamples=500, confidence=0.9).intervals["0"]
    arrays = {source: np.array(some) for source, some in scores.items()}
    assert found["average"]["em"] == interval(list(arrays.values()), 0.9, 500)
    assert found["nq"]["em"] == interval([arrays["nq"]], 0.9, 500)
    assert found["all"]["em"] == interval([np.concatenate(list(arrays.values()))], 0.9, 500)
    assert found["all"]["em"] != found["average"]["em"]


def test_the_precision_that_samples_is_part_of_an_evaluation():
    def of(**sampler):
        config = Config(sampler=SamplerConfig(**sampler), loss=LossConfig(importance_cap=2.0))
        assert config.policy.compute_dtype == "bfloat16"
        return identity(config, {}, {}, [QUESTION], {})

    assert of(name="vllm", dtype="float32") != of(name="vllm")
    assert of(name="vllm", dtype="bfloat16") == of(name="vllm"), "what it is where none is given"


def test_template_arguments_are_part_of_an_evaluation():
    def of(**arguments):
        prompt = PromptConfig(chat_template_kwargs=arguments)
        return identity(Config(prompt=prompt), {}, {}, [QUESTION], {})

    assert len({of(), of(enable_thinking=False), of(enable_thinking=True)}) == 3


def test_other_actions_are_another_evaluation():
    """Without this the rows of an agent that could read pages answered for one that could not."""

    def of(*tools, told="a"):
        told_hash = {"tools": told if len(tools) > 1 else ""}
        config = Config(tools=[ToolConfig(**tool) for tool in tools])
        return identity(config, {}, {}, [QUESTION], told_hash)

    search, access = {"name": "search"}, {"name": "access"}
    both = of(search, access)
    assert len({of(search), both, of(search, access, told="b")}) == 3
    assert of(search, access | {"max_length": 100}) != both
    assert of(search, access | {"timeout": 1.0}) == both


@pytest.mark.parametrize(
    ("reward", "judge", "is_other"),
    [
        ({"answer": "em"}, {}, True),
        ({"answer": {"f1": 0.5, "judge": 0.5}}, {}, True),
        ({}, {"model": "large"}, True),
        ({}, {"max_tokens": 10}, True),
        ({}, {"url": "http://127.0.0.1:2/v1", "timeout": 1.0, "patience": 1.0, "max_concurrency": 2}, False),
        ({"shuffle": True}, {}, False),
    ],
)
def test_what_decides_the_scores_is_part_of_an_evaluation(reward, judge, is_other):
    def of(reward=MappingProxyType({}), judge=MappingProxyType({}), told="a"):
        asked = JudgeConfig(**({"url": "http://127.0.0.1:1/v1", "model": "small"} | judge))
        config = Config(reward=RewardConfig(judge=asked, **reward))
        return identity(config, {}, {}, [QUESTION], {"judge": told})

    assert (of(reward, judge) != of()) == is_other
    assert of(told="b") != of()


def test_pool_of_random_documents_identifies_an_evaluation():
    def of(method, *texts):
        questions = [replace(QUESTION, text=text) for text in texts]
        return identity(Config(evaluate=EvaluateConfig(method=method)), {}, {}, questions, {})

    assert of("random_documents", "Who?") != of("random_documents", "Who?", "Where?")
    assert of("random_documents", "Who?", "Where?") == of("random_documents", "Who?", "Where?")
    assert of("agent", "Who?") == of("agent", "Who?", "Where?"), "each question is answered by itself"
