"""Demonstrations in groups: their tokens beside the agent loop's, who gets them, and until when."""

import asyncio
import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from config_rig import changed
from loop_fakes import DOCUMENT, DictRetriever, ScriptedSampler, context_of

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.sft import encode_demonstration
from calibadv_jax.contrib.group_demonstrations import (
    GroupDemonstrations,
    demonstrations_hash,
    describe_demonstrations,
)
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn
from calibadv_jax.rewards.score import score_trajectory
from calibadv_jax.rollout.agent import run_trajectory
from calibadv_jax.rollout.runner import collect_group
from calibadv_jax.run.wiring import group_parts

QUESTION = Question("q1", "Who?", ("Ann",), "test", ("d1",))
OTHER = Question("q2", "Where?", ("Rome",), "test")
SEARCH = "<think> t </think> <search> ann </search>"
ANSWER = "<think> t </think> <answer> Ann </answer>"
LONG = Document("long", "Ann", "Ann painted. " * 200)


def row(question, answer="Ann", **fields):
    document = {"id": "d1", "title": "Ann", "text": "Ann is a painter."}
    turns = [{"text": SEARCH, "documents": [document]}, {"text": ANSWER.replace("Ann", answer)}]
    fields = {"golden_answers": ["x"], "id": "other", "data_source": "d"} | fields
    return {"question": question, "turns": turns} | fields


def config_of(path, rollout=None, rule="refuse", **demonstrations):
    rollout = {"group_size": 4, "max_observation_length": 300} | (rollout or {})
    demonstrations = {"file": str(path)} | demonstrations
    return changed(
        prompt={"template": "short"},
        data={"overlong_prompts": rule},
        rollout=rollout,
        demonstrations=demonstrations,
    )


def group_demonstrations(tmp_path, tokenizer, rows, questions=(QUESTION, OTHER), warn=print, **keys):
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return GroupDemonstrations(config_of(path, **keys), tokenizer, questions, warn)


# --- Tokens ---


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}<think>"])
@pytest.mark.parametrize("prepend_think", [False, True])
def test_trajectory_is_the_one_that_the_agent_loop_writes(byte_tokenizer, prepend_think, template):
    """The same texts and documents, once sampled and once demonstrated: all but the origin is equal."""
    tokenizer = deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    config = changed(
        prompt={"template": "short", "prepend_think": prepend_think},
        rollout={"max_observation_length": 300},
    )
    opening = "" if prepend_think else "<think>"
    texts = [f"{opening} t </think> <search> ann </search>", f"{opening} u </think> <answer> Ann </answer>"]
    if template and not prepend_think:
        texts[0] = texts[0].removeprefix("<think>")
    documents = (DOCUMENT, LONG)  # the second one is cut
    sampler = ScriptedSampler(tokenizer, lambda _, turn: texts[turn])
    context = context_of(sampler, tokenizer, DictRetriever({"ann": list(documents)}))
    context = replace(context, rollout=config.rollout, prompt=config.prompt)
    sampled = asyncio.run(run_trajectory(context, QUESTION, 0, 0, session="s"))

    turns = (DemoTurn(texts[0], documents), DemoTurn(texts[1]))
    demonstration = Demonstration(replace(QUESTION, id="elsewhere"), turns)
    written = make_encoder(config, tokenizer).trajectory(demonstration, QUESTION)
    assert written.is_demonstration and not sampled.is_demonstration and written.question is QUESTION
    for name in ("prompt_ids", "response_ids", "mask", "trained"):
        np.testing.assert_array_equal(getattr(written, name), getattr(sampled, name))
    names = ("kind", "text", "think", "query", "answer", "documents", "observation_text", "stop_reason")
    for turn, expected in zip(written.turns, sampled.turns, strict=True):
        assert [getattr(turn, name) for name in names] == [getattr(expected, name) for name in names]
        assert not turn.logprobs.any() and turn.policy_versions == ()
    scores = [score_trajectory(trajectory, config.reward) for trajectory in (written, sampled)]
    assert scores[0].metrics == scores[1].metrics and scores[0].answer_score == scores[1].answer_score == 1.0
    assert scores[0].metrics["evidence"] == 1.0


def test_tokens_and_mask_are_those_of_the_cold_start(byte_tokenizer):
    config = changed(prompt={"template": "short"})
    turns = (
        DemoTurn(SEARCH, (DOCUMENT,), trained=False),
        DemoTurn(SEARCH, observation="<search> forged </search>"),
        DemoTurn(ANSWER),
    )
    demonstration = Demonstration(QUESTION, turns)
    written = make_encoder(config, byte_tokenizer).trajectory(demonstration, QUESTION)
    expected = encode_demonstration(demonstration, config, byte_tokenizer, "sampled")
    tokens = np.concatenate([written.prompt_ids, written.response_ids])
    np.testing.assert_array_equal(tokens, expected.tokens)
    np.testing.assert_array_equal(written.trained, expected.mask[len(written.prompt_ids) :])
    assert [turn.is_context for turn in written.turns] == [True, False, False]
    assert written.mask.sum() > written.trained.sum()
    assert "<search>" not in written.turns[1].observation_text


# --- Who gets them ---


def chosen(demonstrations, question=QUESTION, version=0, seed=0):
    return [
        trajectory.answer
        for trajectory in demonstrations.choose(question, version, np.random.default_rng(seed))
    ]


def test_demonstrations_go_to_their_questions_for_the_first_steps(tmp_path, byte_tokenizer):
    rows = [row("Who?"), row("Nobody's question?"), row(" Who? ", "Bo")]
    demonstrations = group_demonstrations(tmp_path, byte_tokenizer, rows, per_group=2, first_steps=3)
    assert chosen(demonstrations) == chosen(demonstrations, version=2) == ["Ann", "Bo"]
    assert chosen(demonstrations, version=3) == chosen(demonstrations, OTHER) == []
    one = group_demonstrations(tmp_path, byte_tokenizer, rows)
    answers = [chosen(one, seed=seed)[0] for seed in range(20)]
    assert set(answers) == {"Ann", "Bo"}
    assert answers == [chosen(one, seed=seed)[0] for seed in range(20)]


def test_questions_of_the_same_text_share_their_demonstrations(tmp_path, byte_tokenizer):
    again = replace(QUESTION, id="q9", golden_answers=("Bo",))
    demonstrations = group_demonstrations(tmp_path, byte_tokenizer, [row("Who?")], (QUESTION, again, OTHER))
    assert list(demonstrations.by_question) == ["q1", "q9"]
    (trajectory,) = demonstrations.by_question["q9"]
    assert trajectory.question is again


def test_long_demonstrations_are_left_out_or_refused(tmp_path, byte_tokenizer):
    lines = []
    rows = [row("Who?"), row("Where?", "A" * 300)]
    keys = {"rollout": {"max_length": 300, "max_prompt_length": 200}, "rule": "leave_out"}
    demonstrations = group_demonstrations(tmp_path, byte_tokenizer, rows, warn=lines.append, **keys)
    assert list(demonstrations.by_question) == ["q1"]
    assert len(lines) == 1 and "rollout.max_length=300" in lines[0]
    with pytest.raises(UserError, match="none is left; raise it"):
        group_demonstrations(tmp_path, byte_tokenizer, rows[1:], **keys)
    with pytest.raises(UserError, match=r"demonstrations.file: .* raise it, or leave them out"):
        group_demonstrations(tmp_path, byte_tokenizer, rows, **keys | {"rule": "refuse"})


def test_demonstrations_of_other_questions_are_refused(tmp_path, byte_tokenizer):
    with pytest.raises(UserError, match=r"demos.jsonl: none of its questions is one of data.train"):
        group_demonstrations(tmp_path, byte_tokenizer, [row("Who else?")])
    with pytest.raises(UserError, match="no-file.jsonl"):
        GroupDemonstrations(config_of(tmp_path / "no-file.jsonl"), byte_tokenizer, [QUESTION], print)


def test_edited_file_has_another_hash(tmp_path, byte_tokenizer):
    hashes = set()
    path = tmp_path / "demos.jsonl"
    for rows in ([row("Who?")], [row("Who?", "Bo")], [row("Who?")]):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
        hashes.add(demonstrations_hash(config_of(path), byte_tokenizer))
    assert len(hashes) == 2


# --- Groups ---


class Judge:
    """Gives every answer its length, and fails for another name."""

    async def score(self, trajectory):
        if trajectory.answer == "Bo":
            raise RequestFailed("judge", "judge: away\nfor long")
        return {"judge": float(len(trajectory.answer))}


def test_demonstrations_take_the_last_places_of_a_group(tmp_path, byte_tokenizer):
    """The sampled ones have the seeds that they have without demonstrations; the judge is asked."""
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(row("Who?")) + "\n" + json.dumps(row("Who?", "Bo")) + "\n")
    parts = group_parts(config_of(path, per_group=2), byte_tokenizer, [QUESTION])
    demonstrations = parts.demonstrations(QUESTION, 0, np.random.default_rng(0))

    def collect(demonstrations):
        sampler = ScriptedSampler(byte_tokenizer, lambda _, turn: [SEARCH, ANSWER][turn])
        context = context_of(sampler, byte_tokenizer, judge=Judge(), group_size=4)
        slots = asyncio.Semaphore(9)
        group = asyncio.run(collect_group(context, QUESTION, slots, 5, "g", parts, demonstrations))
        assert context.work["begun"] == context.work["ended"] == 4 - len(demonstrations)
        return group, sorted((session, sampling.seed) for session, _, sampling in sampler.calls)

    group, seeds = collect(demonstrations)
    plain, plain_seeds = collect([])
    assert [trajectory.index for trajectory in group.attempts] == [0, 1, 2, 3]
    assert [trajectory.is_demonstration for trajectory in group.attempts] == [False, False, True, True]
    assert seeds == plain_seeds[:4] and len(plain_seeds) == 8
    assert group.trajectories[2].metrics == {"judge": 3.0}
    (failed,) = group.failed
    assert failed.index == 3 and failed.error == "judge: judge: away for long"
    assert [trajectory.index for trajectory in group.from_prompt.trajectories] == [0, 1]
    assert demonstrations[0].index == 0 and demonstrations[0].metrics == {}  # the file's own stay unscored
    assert plain.trajectories[3].new_turns and not group.trajectories[2].new_turns


def test_demonstrations_are_described(tmp_path):
    (line,) = describe_demonstrations(config_of("d.jsonl", per_group=2, first_steps=9))
    assert "d.jsonl: up to 2 of 4 trajectories" in line and "the first 9 steps" in line and "ratio" in line
    (line,) = describe_demonstrations(config_of("d.jsonl", importance="shaped", gamma=0.5))
    assert "p / (p + 0.5)" in line
    assert describe_demonstrations(changed()) == []
