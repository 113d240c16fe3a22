"""Evaluation: its own temperature and rewards, whatever training uses; which policy; means by source."""

from __future__ import annotations

import dataclasses
import json

import pytest

from calibadv_jax.config import Config, EvaluateConfig, PolicyConfig, PromptConfig, RewardConfig, RunConfig
from calibadv_jax.data.questions import write_questions
from calibadv_jax.errors import UserError
from calibadv_jax.evaluate import choose_policy, evaluate, report_table, summarise
from calibadv_jax.interfaces import Completion
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.trajectory import Document, Group, Question, Trajectory, Turn

QUESTIONS = [Question(f"{source}{n}", f"{source} {n}", ("yes",), source) for source in "ab" for n in range(4)]
SEARCH, ANSWER = "<think>t</think><search>{}</search>", "<think>t</think><answer>{}</answer>"


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id, all_special_tokens, chat_template = -1, (), None

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def get_added_vocab(self):
        return {}


class Knowing:
    """Answers questions of source a rightly and of b wrongly, after one search; notes how it was asked."""

    def __init__(self):
        self.asked = []

    async def generate(self, token_ids, sampling, session):
        self.asked.append((session, sampling))
        text = "".join(map(chr, token_ids))
        right = "Question: a" in text
        said = ANSWER.format("yes" if right else "no") if "information" in text else SEARCH.format("q")
        ids = [ord(letter) for letter in said]
        return Completion(ids, [-1.0] * len(ids), "stop", (0,))

    def release(self, session):
        pass

    async def close(self):
        pass


class Shelf:
    async def search(self, queries):
        return [[Document("d", "t", "x")] for _ in queries]

    async def close(self):
        pass


@pytest.fixture
def run(tmp_path):
    """Evaluates with changed sections; returns the report and what the sampler was asked."""

    def run(**sections):
        write_questions(tmp_path / "eval.jsonl", QUESTIONS)
        plain = Config()
        data = dataclasses.replace(plain.data, eval=str(tmp_path / "eval.jsonl"))
        data = dataclasses.replace(data, **sections.pop("data", {}))
        config = dataclasses.replace(
            plain, data=data, prompt=PromptConfig(template="short", chat="off"), **sections
        )
        sampler = Knowing()
        context = RolloutContext(sampler, Shelf(), Letters(), config.rollout, config.prompt)
        with Rollouts(context, config.run.seed) as rollouts:
            return evaluate(config, rollouts), sampler.asked

    return run


def test_its_own_temperatures_and_samples_and_no_shuffled_rewards(run):
    """Training samples five at temperature 1 with rewards permuted; greedily, each question is asked once."""
    report, asked = run(
        evaluate=EvaluateConfig(temperatures=[0.0, 0.7], samples=3), reward=RewardConfig(shuffle=True)
    )
    by_temperature = {
        temperature: {s for s, sampling in asked if sampling.temperature == temperature}
        for temperature in (0.0, 0.7)
    }
    assert {sampling.temperature for _, sampling in asked} == {0.0, 0.7}
    assert [len(sessions) for sessions in by_temperature.values()] == [8, 24]
    assert not by_temperature[0.0] & by_temperature[0.7]  # sessions of their own
    seeds = [sampling.seed for _, sampling in asked if sampling.temperature == 0.7]
    assert len(set(seeds)) == len(seeds) == 48
    assert list(report) == ["0", "0.7"]
    for name, count in (("0", 4), ("0.7", 12)):
        right, wrong = (
            {
                "f1": f1,
                "em": f1,
                "cover_em": f1,
                "format": 1,
                "searches": 1,
                "trajectories": count,
                "failed": 0,
            }
            for f1 in (1, 0)
        )
        both = {metric: (right[metric] + wrong[metric]) / 2 for metric in right} | {"trajectories": 2 * count}
        assert report[name] == {"all": both, "a": right, "b": wrong}


def test_the_same_draws_at_every_evaluation_of_a_run_and_others_in_another(run):
    def seeds(seed):
        config = EvaluateConfig(temperatures=[1.0])
        return sorted(sampling.seed for _, sampling in run(run=RunConfig(seed=seed), evaluate=config)[1])

    assert seeds(0) == seeds(0) != seeds(1)


def test_a_limit_takes_from_all_sources(run):
    report, asked = run(data={"eval_limit": 4})
    assert {source: report["0"][source]["trajectories"] for source in "ab"} == {"a": 2, "b": 2}
    assert len(asked) == 2 * 4


def test_shuffled_training_rewards_leave_the_metrics_true_and_the_scores_too(run, monkeypatch):
    """The reward stage is told not to shuffle: the answer scores are those of the answers."""
    groups = []
    monkeypatch.setattr("calibadv_jax.evaluate.summarise", lambda found: groups.extend(found) or {})
    run(reward=RewardConfig(shuffle=True))
    assert [group.trajectories[0].answer_score for group in groups] == [1.0] * 4 + [0.0] * 4


def test_means_by_source():
    def attempt(source, f1, searches):
        ids = [0]
        turns = [Turn("search", ids, ids) for _ in range(searches)]
        metrics = {"f1": f1, "em": 0.0, "cover_em": 1.0, "format": 1.0}
        return Trajectory(Question("q", "?", ("x",), source), ids, turns, metrics=metrics)

    groups = [
        Group(Question("1", "?", ("x",), "a"), [attempt("a", 1.0, 1), attempt("a", 0.5, 2)]),
        Group(Question("2", "?", ("x",), "b"), [attempt("b", 0.0, 0)]),
    ]
    report = summarise(groups)
    assert report["a"] == {
        "f1": 0.75, "em": 0, "cover_em": 1, "format": 1, "searches": 1.5, "trajectories": 2, "failed": 0
    }  # fmt: skip
    assert report["all"]["f1"] == 0.5 and report["all"]["trajectories"] == 3
    lines = report_table({"0": report}).splitlines()
    assert lines[0].split() == [
        "temperature", "questions", "f1", "em", "cover_em", "format", "searches", "trajectories", "failed"
    ]  # fmt: skip
    assert len(lines) == 2 + 3 and "0.750" in lines[3]


def test_what_failed_is_counted_and_left_out_of_the_means():
    question = Question("1", "?", ("x",), "a")
    right = Trajectory(question, [0], [], metrics={"f1": 1.0, "em": 1.0, "cover_em": 1.0, "format": 1.0})
    failed = Trajectory(question, [0], [], error="retriever: gone")
    report = summarise([Group(question, [right, failed, failed])])
    assert (report["a"]["f1"], report["a"]["trajectories"], report["a"]["failed"]) == (1.0, 1, 2)
    nothing = summarise([Group(question, [failed])])
    assert nothing["a"] == {"trajectories": 0, "failed": 1}
    assert report_table({"0": nothing}).splitlines()[-1].split() == ["0", "a", *"-----", "0", "1"]


def test_the_named_policy_then_the_trained_one_then_where_it_began(tmp_path):
    start, named = tmp_path / "start", tmp_path / "named"
    for folder in (start, named):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({}))
    config = dataclasses.replace(
        Config(), run=RunConfig(dir=str(tmp_path / "run")), policy=PolicyConfig(path=str(start))
    )
    assert choose_policy(config).path == start
    with pytest.raises(UserError, match="has no checkpoint; set evaluate.policy or policy.path"):
        choose_policy(dataclasses.replace(config, policy=PolicyConfig()))
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    assert choose_policy(config).path == tmp_path / "run/checkpoints"
    chosen = dataclasses.replace(config, evaluate=EvaluateConfig(policy=str(named)))
    assert choose_policy(chosen).path == named
