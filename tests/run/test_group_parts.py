"""Runs whose groups hold demonstrations and continued near misses: every part of a step, kill and resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
import pytest
import trainer_rig
from tiny_policy import single_device, tiny
from trainer_rig import HF_CONFIG, checkpoints, make_config, make_state, rows

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.train import train
from calibadv_jax.config import Config
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, replay
from calibadv_jax.contrib.pages.terminal import group_lines
from calibadv_jax.contrib.pages.transcript import transcript
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Completion
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn
from calibadv_jax.metrics.catalogue import find_metric
from calibadv_jax.rewards.evidence import check_evidence
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.rollout_store.reader import SharedFields, find_step, read_columns, read_step
from calibadv_jax.run import trainer as trainer_module
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.fingerprints import DEMONSTRATIONS, run_identity
from calibadv_jax.run.model import Model
from calibadv_jax.run.wiring import group_parts

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

WORDS = {"tags": build_word_tokenizer(), "tool_calls": build_word_tokenizer(has_tool_calls=True)}
PROTOCOLS = tuple(WORDS)


def model_of(words):
    shape = HF_CONFIG | {"vocab_size": len(words), "eos_token_id": 1, "max_position_embeddings": 512}
    return Model(tiny(shape), shape, words, Path("none"), single_device())


MODELS = {protocol: model_of(words) for protocol, words in WORDS.items()}
QUESTIONS = [
    Question(f"q{number}", f"who founded {word} ?", ("amber",), "toy", ("p1", "p2"))
    for number, word in enumerate(["aurora", "bay", "cedar", "delta", "ember"])
]
FIRST, SECOND = Document("p1", "aurora", "aurora was"), Document("p2", "amber", "amber works")
SEARCH = "<think> find aurora </think> <search> aurora </search>"
GO_ON = "<think> find amber </think> <search> amber </search>"
ANSWER = "<think> aurora was </think> <answer> {} </answer>"
STEPS = 4


@dataclass
class Sampler:
    """Says what `script(session, turn)` says, with its own count of turns; notes the parameters it gets."""

    config: Config
    loaded: list = field(default_factory=list)
    turns: Counter = field(default_factory=Counter)

    async def generate(self, token_ids, sampling, session):
        encoder = make_encoder(self.config, WORDS[self.config.rollout.protocol])
        demo_turn = DemoTurn(script(session, self.turns[session]))
        (turn,) = encoder.turns(Demonstration(QUESTIONS[0], (demo_turn,)), "")
        ids = turn.token_ids.tolist()
        self.turns[session] += 1
        assert len(ids) <= sampling.max_tokens
        logprobs = [-1.0 - 0.01 * (sampling.seed % 7) - 0.001 * place for place in range(len(ids))]
        return Completion(ids, logprobs, turn.stop_reason, (self.loaded[-1][0],))

    def release(self, session):
        self.turns.pop(session, None)

    async def load(self, version, params):
        self.loaded.append((version, jax.device_get(params)))

    async def prompt_logprobs(self, token_ids):
        return {}

    def metrics(self):
        return {}

    async def close(self):
        pass


class Retriever:
    """Finds a passage for each of two queries, and nothing for others."""

    async def search(self, queries):
        documents = {"aurora": [FIRST], "amber": [SECOND]}
        return [documents.get(query, []) for query in queries]

    async def close(self):
        pass


def script(session, turn):
    """Index 0 is a near miss; what continues it goes on in odd groups, and answers wrongly in even ones.

    A continuation's own turns are counted from 0, and group 3 has a right trajectory.
    """
    group, _, index = session.removeprefix("group").partition("/")
    if index == "0":
        return [SEARCH, ANSWER.format("aurora")][turn]
    if index == "1":
        return ANSWER.format("amber") if group == "3" else [SEARCH.replace("aurora", "bay"), ANSWER][turn]
    return [GO_ON, ANSWER.format("amber")][turn] if int(group) % 2 else ANSWER.format("bay")


def write_demonstrations(folder, answer="amber"):
    """For all questions but the last one."""
    lines = []
    for question in QUESTIONS[:-1]:
        shown = [{"id": d.id, "title": d.title, "text": d.text} for d in (FIRST, SECOND)]
        turns = [
            {"text": SEARCH, "documents": shown[:1]},
            {"text": GO_ON, "documents": shown[1:]},
            {"text": ANSWER.format(answer)},
        ]
        row = {"id": question.id, "question": question.text, "golden_answers": ["amber"]}
        lines.append(json.dumps(row | {"data_source": "toy", "turns": turns}))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demonstrations.jsonl"
    path.write_text("\n".join(lines))
    return path


def config_of(folder, demonstrations=None, continuations=None, protocol="tags", **sections):
    """Two groups a step, by default of two trajectories from the prompt, a continuation, a demonstration."""
    if demonstrations is None:
        path = write_demonstrations(folder.parent)
        demonstrations = {"file": str(path), "first_steps": 2, "importance": "shaped"}
    sections = {"policy": {"compute_dtype": "float32"}, "log": {"backends": [], "progress": False}} | sections
    lengths = {"max_prompt_length": 16, "max_turn_length": 16, "max_observation_length": 48}
    prompt = {"template": "{question}"}
    if protocol == "tool_calls":
        lengths = {"max_prompt_length": 24, "max_turn_length": 40, "max_observation_length": 48}
        prompt = {"system": ""}
    groups = {"questions_per_step": 2, "group_size": 4, "max_length": 128}
    config = make_config(
        folder,
        prompt=prompt,
        rollout={"protocol": protocol} | groups | lengths,
        demonstrations=demonstrations,
        continuations={"per_group": 1} if continuations is None else continuations,
        **{"learner": {"steps": STEPS, "pack_length": 128, "microbatch_rows": 8}} | sections,
    )
    learner = replace(config.learner, optimizer=replace(config.learner.optimizer, lr=0.01))
    return replace(config, learner=learner)


@pytest.fixture(autouse=True)
def words(monkeypatch):
    monkeypatch.setattr(trainer_rig, "QUESTIONS", QUESTIONS)


def run(config, folder):
    """Train with the agent loop itself, and return the sampler."""
    sampler = Sampler(config)
    words = WORDS[config.rollout.protocol]
    context = RolloutContext(
        sampler, Retriever(), words, config.rollout, config.prompt, answer_from=config.answer_from
    )
    model = MODELS[config.rollout.protocol]
    with patch.object(trainer_rig, "MODEL", model), Rollouts(context, config.run.seed) as rollouts:
        rollouts.parts = group_parts(config, words, QUESTIONS)
        with Stop() as stop, make_state(config, folder, rollouts) as state:
            train(state, stop)
    return sampler


# --- A run ---


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_part_of_a_run_knows_them(tmp_path, protocol):
    """Groups, metrics, record, replay and pages; demonstrations stand in the first two steps only."""
    folder = tmp_path / "run"
    config = config_of(folder, protocol=protocol)
    sampler = run(config, folder)
    written = rows(folder)
    by_step = [{name for name in row if name.startswith("demonstrations/")} for row in written]
    assert bool(by_step[0]) and by_step[2] == by_step[3] == set()
    assert all(find_metric(name) is not None for row in written for name in row if name.startswith("co"))
    assert all(find_metric(name) for name in by_step[0])
    first = written[0]
    assert first["demonstrations/score"] == 1.0 and first["demonstrations/evidence"] == 1.0
    assert first["demonstrations/searches"] == 2.0 and first["demonstrations/logprob"] < 0
    assert first["continuations/prefix_turns"] == 1.0 and first["continuations/source_score"] == 0.0
    # The two from the prompt of each group: one search each, no right answer.
    assert (
        first["rollout/searches/mean"] == 1.0 and first["reward/mean"] == 0.0 and first["group/solved"] == 0
    )
    assert len(sampler.loaded) == STEPS + 1
    initial, trained = (jax.tree.leaves(params) for _, params in sampler.loaded[:2])
    assert any(np.any(before != after) for before, after in zip(initial, trained, strict=True))

    kept = read_step(find_step(folder, 1))
    for group in kept.groups:
        is_shown = [trajectory.is_demonstration for trajectory in group.trajectories]
        has_demonstration = group.question is not None and group.question.id != QUESTIONS[-1].id
        assert is_shown == [False, False, False, has_demonstration]
        continued = group.trajectories[2]
        assert (
            continued.continues == 0 and continued.turns[0].is_context and not continued.turns[1].is_context
        )
    columns = read_columns(find_step(folder, 1), ["is_demonstration", "continues"]).to_pydict()
    assert columns["continues"].count(0) == 2
    replayed = replay(kept, kept_config(kept, Path("step")))
    num_equal, num_turns = equal_turns(kept.credits, replayed.advantages.credits, rounding=0)
    assert num_equal == num_turns > 0
    for name in ("actor/pg_loss", "demonstrations/logprob", "continuations/score", "reward/mean"):
        assert replayed.metrics[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), name


class Pieces:
    """One piece a token, as the page's reader of tokenizer.json cuts them."""

    def text(self, ids):
        return " ".join(self.pieces(ids))

    def pieces(self, ids):
        return [WORDS["tags"].decode([token]) for token in ids]


def test_page_says_where_trajectories_come_from(tmp_path):
    folder = tmp_path / "run"
    config = config_of(folder, learner={"steps": 1, "pack_length": 128, "microbatch_rows": 8})
    run(config, folder)
    table = read_columns(find_step(folder, 1)).to_pylist(maps_as_pydicts="strict")
    group = [row for row in table if row["group"] == 0]
    assert group[3]["is_demonstration"]
    page = transcript(group, Pieces(), config.advantage, SharedFields())
    origins = [trajectory["origin"] for trajectory in page["trajectories"]]
    assert origins == ["", "", "continues turn 1 of trajectory 0", "demonstration"]
    source, _, continued, shown = page["trajectories"]
    assert "mean over the trajectories 0, 2" in source["turns"][0]["why"]
    assert continued["turns"][0]["why"] == "Not trained here: trained in trajectory 0."
    assert shown["turns"][0]["learner_logprobs"] is None
    assert shown["turns"][0]["logprobs"] == [
        round(value, 4) for value in group[3]["turns"][0]["learner_logprobs"]
    ]
    lines = list(group_lines(group, page))
    assert any("trajectory 3, demonstration" in line for line in lines)
    assert any("trajectory 2, continues turn 1 of trajectory 0" in line for line in lines)


def broken(function, at):
    """The function, which raises when it is called the `at`-th time."""
    calls = count(1)

    def fail(*arguments):
        if next(calls) == at:
            raise RuntimeError("the machine is gone")
        return function(*arguments)

    return fail


@pytest.mark.parametrize(
    ("importance", "killed", "protocol"),
    [
        ("ratio", 2, "tags"),
        ("ratio", 3, "tags"),
        ("shaped", 2, "tags"),
        ("shaped", 3, "tags"),
        ("shaped", 2, "tool_calls"),
    ],
)
def test_killed_run_resumes_bit_for_bit(tmp_path, monkeypatch, importance, killed, protocol):
    """Within the steps with demonstrations, and behind them."""
    demonstrations = {"file": str(write_demonstrations(tmp_path)), "first_steps": 2, "importance": importance}
    learner = {"steps": STEPS, "pack_length": 128, "microbatch_rows": 8, "minibatch_size": 3}
    settings = {"learner": learner, "checkpoint": {"every": 1}}
    whole = config_of(tmp_path / "whole", demonstrations, None, protocol, **settings)
    expected = run(whole, tmp_path / "whole")
    parts = config_of(tmp_path / "parts", demonstrations, None, protocol, **settings)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="the machine is gone"):
        patched.setattr(trainer_module, "learn", broken(trainer_module.learn, killed))
        run(parts, tmp_path / "parts")
    assert max(checkpoints(tmp_path / "parts")) == killed - 1
    again = run(parts, tmp_path / "parts")
    np.testing.assert_equal(again.loaded[-1][1], expected.loaded[-1][1])
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_tied_groups_are_replaced_and_pass_rates_are_those_from_the_prompt(tmp_path):
    """A demonstration unties a group; a question that only it solves is not too easy.

    Of the three from the prompt none is right in group 0, and one in group 1, whose question rests.
    """
    data = {"rest_above": 0.2, "rest_after": 1}
    config = config_of(tmp_path / "run", continuations={}, data=data)
    config = replace(config, rollout=replace(config.rollout, dynamic_sampling=4))
    config = replace(config, demonstrations=replace(config.demonstrations, first_steps=1))
    config = replace(config, learner=replace(config.learner, steps=1))
    run(config, tmp_path / "run")
    row = rows(tmp_path / "run")[0]
    assert row["demonstrations/group_share"] == 1.0
    assert row["group/tied"] == 0.0 and row["rollout/replaced_groups"] == 0.0
    assert row["rollout/resting_questions"] == 1.0


# --- Starts ---


def test_edited_demonstrations_are_another_experiment(tmp_path):
    config = config_of(tmp_path / "run")
    before = run_identity(config, MODELS["tags"], QUESTIONS)[DEMONSTRATIONS]
    write_demonstrations(tmp_path, "bay")
    assert run_identity(config, MODELS["tags"], QUESTIONS)[DEMONSTRATIONS] != before
    plain = config_of(tmp_path / "plain", {}, {})
    assert DEMONSTRATIONS not in run_identity(plain, MODELS["tags"], QUESTIONS)


def test_continuations_need_questions_with_supporting_passages(tmp_path):
    config = config_of(tmp_path / "run")
    without = [replace(question, supporting_ids=()) for question in QUESTIONS]
    with pytest.raises(
        UserError, match="continuations.per_group needs questions that name .* supporting_ids"
    ):
        check_evidence(without, config.reward, config.continuations)
    check_evidence(QUESTIONS, config.reward, config.continuations)
    check_evidence(without, config.reward)


def test_start_says_what_groups_hold(tmp_path):
    lines = describe_choices(config_of(tmp_path / "run"))
    assert sum("in the first 2 steps" in line for line in lines) == 1
    assert sum("second round: 1 of 4" in line for line in lines) == 1
