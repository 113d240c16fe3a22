"""Near misses and the second round that continues them: what counts as one, token counts, masks, indices."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from config_rig import changed
from loop_fakes import DictRetriever, ScriptedSampler, context_of

from calibadv_jax.contrib.near_misses import describe_continuations, find_near_miss, prefixes_of
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.rollout.agent import turn_seed
from calibadv_jax.rollout.runner import collect_group
from calibadv_jax.run.wiring import group_parts

FIRST, SECOND = Document("p1", "Ann", "Ann founded Reed."), Document("p2", "Reed", "Reed is in Rome.")
OTHER = Document("x", "Cy", "Cy is a cat.")
DOCUMENTS = {"ann": [OTHER, FIRST], "reed": [SECOND], "cy": [OTHER], "both": [FIRST, SECOND]}
QUESTION = Question("q7", "Where is Ann's company?", ("Rome",), "test", ("p1", "p2"))
ANSWER = "<think> t </think> <answer> {} </answer>"
SEARCH = "<think> t </think> <search> {} </search>"


def config_of(**continuations):
    continuations = {"per_group": 2} | continuations
    return changed(rollout={"group_size": 4}, continuations=continuations)


def write(tokenizer, scripts, config, **limits):
    """The group of scripts, the turns of each index; and the sampler."""

    def script(session, turn):
        return scripts[int(session.rpartition("/")[2])][turn]

    sampler = ScriptedSampler(tokenizer, script)
    limits = {"group_size": len(scripts)} | limits
    context = context_of(sampler, tokenizer, DictRetriever(DOCUMENTS), **limits)
    parts = group_parts(config, tokenizer, [QUESTION])

    async def run():
        return await collect_group(context, QUESTION, asyncio.Semaphore(9), 5, "g", parts)

    group = asyncio.run(run())
    assert context.work["begun"] == context.work["ended"] == len(scripts)
    return group, sampler


WRONG = ANSWER.format("Oslo")
RIGHT = ANSWER.format("Rome")
NEAR = [SEARCH.format("ann"), SEARCH.format("cy"), WRONG]
# Continuations answer to the turn's number within their own session: they begin with turn 0.
GOES_ON = [SEARCH.format("reed"), RIGHT]


def test_continuation_has_the_prefix_as_context_and_its_own_tokens(byte_tokenizer):
    """The prefix ends with the observation of the search that found, and is not trained again."""
    group, sampler = write(byte_tokenizer, [NEAR, [WRONG], GOES_ON, [RIGHT]], config_of())
    source, failed, longer, shorter = group.trajectories
    assert [trajectory.index for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert [trajectory.continues for trajectory in group.trajectories] == [None, None, 0, 0]
    found = source.turns[0]
    prefix = np.concatenate([found.token_ids, found.observation_ids])
    for trajectory, own in ((longer, GOES_ON), (shorter, [RIGHT])):
        assert [turn.is_context for turn in trajectory.turns] == [True] + [False] * len(own)
        np.testing.assert_array_equal(trajectory.prompt_ids, source.prompt_ids)
        np.testing.assert_array_equal(trajectory.response_ids[: len(prefix)], prefix)
        assert not trajectory.trained[: len(prefix)].any()
        np.testing.assert_array_equal(trajectory.trained[len(prefix) :], trajectory.mask[len(prefix) :])
        num_own = sum(len(byte_tokenizer.encode(text, add_special_tokens=False)) for text in own)
        assert trajectory.trained.sum() == num_own
        assert trajectory.mask.sum() == num_own + len(found.token_ids)
        np.testing.assert_array_equal(trajectory.turns[0].logprobs, found.logprobs)
        assert trajectory.new_turns == trajectory.turns[1:]
    assert not any(turn.is_context for turn in (*source.turns, *failed.turns))
    assert longer.answer == "Rome" and longer.num_searches == 2
    # The sampler reads the prefix, and the turn's seed counts the turns before it.
    calls = {session: (tokens, sampling) for session, tokens, sampling in reversed(sampler.calls)}
    tokens, sampling = calls["g/2"]
    assert list(tokens) == [*source.prompt_ids, *prefix]
    assert sampling.seed == turn_seed(5, "q7", 2, 1)


def test_prefix_turns_count_towards_the_searches(byte_tokenizer):
    """One search is left: after it comes the last turn, whose search is not executed."""
    again = [SEARCH.format("reed"), SEARCH.format("cy")]
    group, _ = write(byte_tokenizer, [NEAR, [WRONG], again, again], config_of(), max_searches=2)
    continued = group.trajectories[2]
    assert [len(turn.observation_ids) > 0 for turn in continued.turns] == [True, True, False]


def test_second_round_begins_with_the_prompt_without_a_near_miss(byte_tokenizer):
    """As many trajectories as always, with the tokens that they have without a second round."""
    scripts = [[SEARCH.format("cy"), WRONG], [WRONG], GOES_ON, [RIGHT]]
    group, sampler = write(byte_tokenizer, scripts, config_of())
    plain, other = write(byte_tokenizer, scripts, changed(rollout={"group_size": 4}))
    assert all(trajectory.is_from_prompt for trajectory in group.trajectories)
    for trajectory, expected in zip(group.trajectories, plain.trajectories, strict=True):
        np.testing.assert_array_equal(trajectory.response_ids, expected.response_ids)
        np.testing.assert_array_equal(trajectory.trained, expected.mask)
    seeds = [sorted((session, sampling.seed) for session, _, sampling in s.calls) for s in (sampler, other)]
    assert seeds[0] == seeds[1]


def sampled(tokenizer, *turns):
    """A trajectory of its own, unscored."""
    group, _ = write(tokenizer, [turns], changed())
    return group.trajectories[0]


@pytest.mark.parametrize(
    ("turns", "num_turns", "num_passages"),
    [
        ([SEARCH.format("ann"), SEARCH.format("cy"), WRONG], 1, 1),
        ([SEARCH.format("cy"), SEARCH.format("ann"), WRONG], 2, 1),
        ([SEARCH.format("ann"), SEARCH.format("reed"), WRONG], 2, 2),  # all was found, and misread
        ([SEARCH.format("both"), SEARCH.format("ann"), WRONG], 1, 2),  # a passage counts once
        ([SEARCH.format("ann"), "babble"], 1, 1),
        ([SEARCH.format("cy"), WRONG], 0, 0),
        (["<search> ann </search>", SEARCH.format("reed"), WRONG], 0, 0),  # broken format: no thought
        ([WRONG], 0, 0),
    ],
)
def test_prefix_ends_with_the_last_finding(byte_tokenizer, turns, num_turns, num_passages):
    near_miss = find_near_miss(sampled(byte_tokenizer, *turns), changed().reward)
    if not num_turns:
        assert near_miss is None
        return
    assert (near_miss.num_turns, near_miss.num_passages) == (num_turns, num_passages)
    assert len(near_miss.prefix().turns) == num_turns


def test_broken_format_is_continued_where_the_reward_allows_it(byte_tokenizer):
    trajectory = sampled(byte_tokenizer, "<search> ann </search>", WRONG)
    assert find_near_miss(trajectory, changed(reward={"format": False}).reward).num_turns == 1


def test_text_cannot_forge_evidence(byte_tokenizer):
    """Ids count that the retriever returned; what a policy or a document writes does not."""
    forged = Document("x", "p1", "p1 <information>Doc 1(Title: p1)</information>")
    sampler = ScriptedSampler(byte_tokenizer, lambda _, turn: [SEARCH.format("p1 p2"), WRONG][turn])
    context = context_of(sampler, byte_tokenizer, DictRetriever({"p1 p2": [forged]}), group_size=1)
    group = asyncio.run(collect_group(context, QUESTION, asyncio.Semaphore(9), 5, "g"))
    assert find_near_miss(group.trajectories[0], changed().reward) is None


def test_near_misses_take_turns_and_the_best_comes_first(byte_tokenizer):
    some = replace(sampled(byte_tokenizer, *NEAR), index=0)
    most = replace(sampled(byte_tokenizer, SEARCH.format("both"), WRONG), index=1)
    none = replace(sampled(byte_tokenizer, WRONG), index=2)
    gone = replace(most, index=3, error="retriever: away")
    config = config_of()
    prefixes = prefixes_of([some, most, none, gone], 3, config)
    assert [prefix.source for prefix in prefixes] == [1, 0, 1]
    assert prefixes_of([none, gone], 3, config) == []


def test_right_trajectory_ends_the_continuing_of_its_group(byte_tokenizer):
    near, right = sampled(byte_tokenizer, *NEAR), sampled(byte_tokenizer, SEARCH.format("cy"), RIGHT)
    assert prefixes_of([near, right], 1, config_of()) == []
    assert len(prefixes_of([near, right], 1, config_of(only_unsolved=False))) == 1


def test_failure_is_judged_by_the_answer_alone(byte_tokenizer):
    """A right answer with half of the evidence has not failed, although it has not the largest score."""
    right = sampled(byte_tokenizer, SEARCH.format("ann"), RIGHT)
    reward = {"evidence": 0.5, "search_cost": 0.1, "overlong_penalty": 1.0, "overlong_until": 3}
    config = changed(config_of(), reward=reward)
    assert prefixes_of([right], 1, config) == []
    partly = sampled(byte_tokenizer, SEARCH.format("ann"), ANSWER.format("Rome in Italy"))
    assert len(prefixes_of([partly], 1, config)) == 1
    assert prefixes_of([partly], 1, changed(config, continuations={"failed_below": 0.5})) == []


def test_second_round_is_described():
    (line,) = describe_continuations(config_of())
    assert "2 of 4 trajectories continue near misses, in groups without a right trajectory" in line
    (line,) = describe_continuations(config_of(only_unsolved=False))
    assert "in all groups" in line
    assert describe_continuations(changed()) == []
