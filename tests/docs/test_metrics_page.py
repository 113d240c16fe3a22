"""docs/metrics.md: every name that a run logs is documented, and every documented one is logged."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_run import SMALL
from tiny_policy import Letters
from trainer_rig import MODEL, QUESTIONS, ScriptedRollouts, make_config, write_group

from calibadv_jax.commands import sft
from calibadv_jax.commands.train import train
from calibadv_jax.config import load_config
from calibadv_jax.config.sections.credit import JUDGE, JUDGE_AGREEMENT
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Document
from calibadv_jax.metrics.catalogue import Metric, authors_names, find_metric, metrics
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.state import RunState
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from scripts import document_metrics

pytestmark = pytest.mark.medium
ROOT = Path(__file__).resolve().parents[2]


class EventfulRollouts(ScriptedRollouts):
    """Everything that a metric counts happens: searches that find, a judge, a failure, workers."""

    context = SimpleNamespace(tokenizer=Letters())

    def begin(self, number, question):
        future = Future()
        group = write_group(number, question)
        for index, trajectory in enumerate(group.trajectories):
            trajectory.actions = ("search", "access")
            trajectory.protocol = "tool_calls"
            trajectory.question = replace(question, supporting_ids=("d1",))
            trajectory.metrics |= {JUDGE: 1.0, JUDGE_AGREEMENT: 1.0}  # as the agent loop notes them
            trajectory.turns[0].documents = (Document("d1", "", ""), Document(f"x{index}", "", ""))
            for turn in trajectory.turns:
                turn.policy_versions = (0,)
                turn.token_ids = np.append(turn.token_ids, turn.token_ids[:1])  # long enough for a 4-gram
                turn.logprobs = np.append(turn.logprobs, turn.logprobs[:1])
        if number == 0:
            group.failed.append(group.trajectories.pop(2))
            group.failed[0].error = "retriever: gone"
        future.set_result(group)
        return future

    def metrics(self):
        return VllmSampler.metrics(SimpleNamespace(lost_count=1))

    def load(self, version, params):
        super().load(version, params)
        self.logprobs = {"worker": np.zeros(14, np.float32)}

    def collect(self, questions, name, seed, complete, **_):
        for number, question in enumerate(questions):
            complete(write_group(number, question, 1))


def logged(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Names in the rows of a run in which everything is switched on."""
    folder = tmp_path_factory.mktemp("run")
    limits = {"max_prompt_length": 12, "max_length": 16, "max_failed_share": 0.5}
    config = make_config(
        folder,
        learner={"steps": 1, "minibatch_size": 4, "pack_length": 16, "microbatch_rows": 8},
        loss={"kl_coef": 0.1, "importance_high": 8.0},
        teacher={"policy": "initial", "acts_on": "loss"},
        rollout={"questions_per_step": 2, "group_size": 3, "dynamic_sampling": 1} | limits,
        prompt={"template": "{question}"},
        evaluate={"every": 1, "temperatures": [1.0]},
        data={"train": str(folder / "train.jsonl"), "eval": str(folder / "train.jsonl"), "rest_above": 0.9},
        reward={"overlong_penalty": 0.5, "overlong_until": 1000},
        checkpoint={"every": 0},
        advantage={"base": "gae", "probes": ["current", "initial"]},
    )
    rollouts = EventfulRollouts()
    console = Console(progress=False)
    state = RunState(config, MODEL, QUESTIONS, rollouts, folder, console)
    with Stop() as stop, state:
        train(state, stop)
    return logged(folder / "metrics.jsonl")


class MixedRollouts(EventfulRollouts):
    """Groups of a trajectory from the prompt, one that continues it, and a demonstration."""

    def begin(self, number, question):
        future = Future()
        group = super().begin(number + 1, question).result()
        source, continuation, demonstration = group.trajectories
        continuation.continues = source.index
        continuation.turns[0] = replace(source.turns[0], is_context=True)
        demonstration.is_demonstration = True
        future.set_result(group)
        return future


@pytest.fixture(scope="module")
def mixed_groups(tmp_path_factory):
    """Names in the rows of a run whose groups hold demonstrations and continuations."""
    folder = tmp_path_factory.mktemp("mixed")
    config = make_config(
        folder,
        learner={"steps": 1, "pack_length": 16, "microbatch_rows": 8},
        rollout={"questions_per_step": 2, "group_size": 3, "max_prompt_length": 12, "max_length": 16},
        prompt={"template": "{question}"},
        data={"train": str(folder / "train.jsonl")},
        checkpoint={"every": 0},
    )
    state = RunState(config, MODEL, QUESTIONS, MixedRollouts(), folder, Console(progress=False))
    with Stop() as stop, state:
        train(state, stop)
    return logged(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    demonstrations = folder / "demonstrations.jsonl"
    overrides = [*SMALL, f"run.dir={folder}", "sft.phases=[{steps: 2}]", "sft.rows=8", "sft.held_out=0.5"]
    turns = [{"text": "<think> a </think> <answer> no </answer>"}]
    shared = {"golden_answers": ["no"], "data_source": "mine", "turns": turns}
    rows = [{"id": text, "question": text} | shared for text in ("who ?", "where ?")]
    demonstrations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides += [f"sft.demonstrations={demonstrations}"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    write_world(config.world)
    sft.run(config)
    return logged(folder / "sft_metrics/metrics.jsonl")


def test_every_logged_name_is_documented(training, mixed_groups, cold_start):
    assert not sorted(name for name in training | mixed_groups | cold_start if find_metric(name) is None)


def test_every_documented_name_is_logged(training, mixed_groups, cold_start):
    names = [name for metric in metrics() for own in metric.names() for name in (own, *authors_names(own))]
    patterns = {name: "[^/]+".join(map(re.escape, re.split(r"<[^>]*>", name))) for name in names}
    logged = training | mixed_groups | cold_start
    assert not [name for name in names if not any(re.fullmatch(patterns[name], other) for other in logged)]


def test_names_and_the_authors_names():
    names = [name for metric in metrics() for name in metric.names()]
    assert len(names) == len(set(names)) and all(metric.unit and metric.meaning for metric in metrics())
    assert Metric("a/{mean,max}", "", "").names() == ["a/mean", "a/max"]
    assert authors_names("reward/mean") == ["critic/score/mean"]
    assert authors_names("rollout/searches/mean") == ["env/number_of_valid_search"]
    assert authors_names("actor/loss") == []
    assert find_metric("critic/score/max") == find_metric("reward/max") is not None
    assert find_metric("rollout/failed/retriever").unit == "trajectories"
    assert find_metric("eval/nq/f1/greedy") is not None
    assert find_metric("eval/hotpotqa/hotpot_qa/f1/greedy") is find_metric("eval/nq/f1/greedy")
    assert find_metric("eval/nq/f1") is find_metric("reward/means") is None


def test_units_and_meanings_are_written():
    for metric in metrics():
        assert metric.unit, metric
        assert metric.meaning, metric
        assert not metric.meaning.startswith(" "), metric


def test_row_of_a_metric_has_four_cells():
    assert document_metrics.cells(find_metric("group/solved")) == [
        "`group/solved`",
        "share",
        "questions with at least one trajectory of the largest reward",
        "`correct_rate/least_one_correct`",
    ]


def test_metrics_page_is_current():
    page = document_metrics.PAGE.read_text(encoding="utf-8")
    assert page == document_metrics.page(), "run: python -m scripts.document_metrics"
    line = re.search(r"\| `group/solved` \| share \| [^|]+ \| `correct_rate/least_one_correct` \|", page)
    assert line
