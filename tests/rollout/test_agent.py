"""The turn loop: exact spans, every limit, and text that tries to act for the environment."""

import asyncio
from copy import deepcopy

import numpy as np
import pytest
from loop_fakes import DOCUMENT, EOS, QUESTION, Loop, context_of

from calibadv_jax.config import PromptConfig, RewardConfig
from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.core.tags import STOP_STRINGS
from calibadv_jax.core.trajectory import Group
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.agent import run_trajectory, turn_seed

SEARCH = "<think> a </think>\n<search> ann </search>"
ANSWER = "<think> b </think>\n<answer> Ann </answer>"
PROSE = "prose" + EOS
SHOWN = '\n\n<information>Doc 1(Title: "Ann") Ann is a painter.</information>\n\n'
NOTHING = "\n\n<information>No results found.</information>\n\n"
# The authors' words.
NOTICE = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. If I want to give the final answer, I should put the answer between <answer> and "
    "</answer>. Let me try again.\n"
)
THINK = PromptConfig(template="short", prepend_think=True)


def test_search_read_answer(loop):
    trajectory = loop(SEARCH, ANSWER, index=2)
    search, answer = trajectory.turns
    assert (search.kind, search.think, search.query, search.answer) == ("search", "a", "ann", "")
    assert (answer.kind, answer.think, answer.query, answer.answer) == ("answer", "b", "", "Ann")
    assert trajectory.question is QUESTION and trajectory.index == 2
    assert (trajectory.answer, trajectory.policy_versions) == ("Ann", (3, 4))
    assert (loop.retriever.queries, loop.sampler.released) == (["ann"], ["s"])


RETRY = {"on_invalid": "retry"}


@pytest.mark.parametrize(
    ("turns", "limits", "kinds", "observed"),
    [
        # The turn after the last search gets no observation; it may answer.
        ([SEARCH] * 3, {"max_searches": 2}, ["search"] * 3, [SHOWN, SHOWN, ""]),
        ([SEARCH, ANSWER], {"max_searches": 1}, ["search", "answer"], [SHOWN, ""]),
        # An invalid turn ends the trajectory, unless it is retried; retries count against the turns.
        ([PROSE, ANSWER], {}, ["invalid"], [""]),
        (["<think> a </think><search> </search>", ANSWER], {}, ["invalid"], [""]),
        (["</search>", ANSWER], {}, ["invalid"], [""]),
        ([PROSE, ANSWER], RETRY, ["invalid", "answer"], [NOTICE, ""]),
        ([PROSE, ANSWER], RETRY | {"prompt": THINK}, ["invalid", "answer"], [NOTICE + "<think>", ""]),
        ([PROSE] * 3, RETRY | {"max_searches": 2}, ["invalid"] * 3, [NOTICE, NOTICE, ""]),
        # A turn that is cut ends it too.
        (["<think> going on", ANSWER], {"max_turn_length": 10}, ["unfinished"], [""]),
        (["going on", ANSWER], {"max_turn_length": 5} | RETRY, ["unfinished"], [""]),
        # Tokens past a tag stay as sampled.
        ([SEARCH + "\n", ANSWER + "\n"], {}, ["search", "answer"], [SHOWN, ""]),
        ([SEARCH, ANSWER], {"documents": {}}, ["search", "answer"], [NOTHING, ""]),
    ],
    ids=str,
)
def test_turns_and_their_observations(loop, turns, limits, kinds, observed):
    trajectory = loop(*turns, **limits)
    assert [turn.kind for turn in trajectory.turns] == kinds
    assert [turn.observation_text for turn in trajectory.turns] == observed
    assert len(loop.retriever.queries) == observed.count(SHOWN) + observed.count(NOTHING)
    for turn, text, shown in zip(trajectory.turns, turns, observed, strict=False):
        is_cut, sampled = turn.kind == "unfinished", loop.text(turn.token_ids)
        assert sampled == (text[: limits["max_turn_length"]] if is_cut else text)
        assert turn.text == sampled.removesuffix(EOS)  # which is trained on, but not read
        assert turn.stop_reason == ("length" if is_cut else "eos" if EOS in text else "stop")
        assert loop.text(turn.observation_ids) == shown and not turn.is_refused
        assert turn.documents == ((DOCUMENT,) if shown == SHOWN else ())
    assert loop.text(trajectory.response_ids[~trajectory.mask]) == "".join(observed)


def test_length_limits_turns_and_observations(loop):
    def num_tokens(*texts):
        return sum(len(loop.tokenizer.encode(text)) for text in texts)

    searched = num_tokens("Question: Who?\n", SEARCH)
    shown = searched + num_tokens(SHOWN)
    limits = {"max_prompt_length": 20}
    trajectory = loop(SEARCH, "x" * 99, max_length=shown + 7, **limits)  # the last turn gets what is left
    assert [call[2].max_tokens for call in loop.sampler.calls] == [shown + 7 - 15, 7]
    assert [turn.kind for turn in trajectory.turns] == ["search", "unfinished"]
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) == shown + 7
    # An observation leaves room for a token, or is dropped; where nothing can be shown, nothing is searched.
    assert len(loop(SEARCH, "xx", max_length=shown + 1, **limits).turns) == 2
    for length, queries in ((shown, ["ann"]), (searched, [])):
        (turn,) = loop(SEARCH, max_length=length, **limits).turns
        assert turn.kind == "search" and not turn.observation_text
        assert len(turn.documents) == len(turn.observation_ids) == 0
        assert loop.retriever.queries == queries


@pytest.mark.parametrize("by_letter", [False, True])
def test_prompt_and_response_are_the_samplers_tokens(loop, by_letter):
    """Also where encoding the text anew would give other tokens."""
    trajectory = loop(SEARCH, SEARCH, ANSWER, by_letter=by_letter)
    assert (loop.tokenizer.encode(SEARCH) == trajectory.turns[0].token_ids.tolist()) is not by_letter
    everything = [*trajectory.prompt_ids, *trajectory.response_ids]
    written = loop.sampler.written["s"]
    for (_, context, _), completion in zip(loop.sampler.calls, written, strict=True):
        assert everything[: len(context)] == list(context)
        assert everything[len(context) : len(context) + len(completion.token_ids)] == completion.token_ids
    assert loop.text(everything) == f"Question: Who?\n{SEARCH}{SHOWN}{SEARCH}{SHOWN}{ANSWER}"


def test_sampling_settings_reach_the_sampler(loop):
    loop(SEARCH, ANSWER, temperature=0.5, top_p=0.9, top_k=7, max_turn_length=50, seed=11, index=3)
    for number, (session, _, sampling) in enumerate(loop.sampler.calls):
        expected = SamplingParams(50, 0.5, 0.9, 7, turn_seed(11, "q7", 3, number), STOP_STRINGS)
        assert (session, sampling) == ("s", expected)


def test_seeds_are_stable_and_depend_on_everything():
    cases = (1, "q", 2, 3), (0, "q", 2, 3), (1, "p", 2, 3), (1, "q", 0, 3), (1, "q", 2, 0)
    seeds = [turn_seed(*case) for case in cases]
    assert seeds[0] == 3529055998 and len(set(seeds)) == 5 and all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("prepend_think", [False, True])
def test_first_turn_continues_thought_of_template(byte_tokenizer, prepend_think):
    tokenizer = deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}{{ '<|im_end|><think>\\n' }}"
    later = [text.removeprefix("<think>" * prepend_think) for text in (SEARCH, ANSWER)]
    prompt = PromptConfig(template="short", prepend_think=prepend_think)
    trajectory = Loop(tokenizer)(SEARCH.removeprefix("<think>"), *later, prompt=prompt)
    assert [turn.think for turn in trajectory.turns] == ["a", "a", "b"]
    openings = ["<think>\n", *["<think>" * prepend_think] * 2]
    assert [trajectory.opening_of(number) for number in range(3)] == openings
    (group,) = score_groups([Group(QUESTION, [trajectory])], RewardConfig(), np.random.default_rng(0))
    assert group.trajectories[0].format_valid and group.trajectories[0].answer_score == 1


def test_any_end_token_is_left_out_of_text(byte_tokenizer):
    class OtherEnd:
        async def generate(self, token_ids, sampling, session):
            return Completion(byte_tokenizer.encode("no<|im_end|>"), [-1.0] * 3, "eos", (0,))

        def release(self, session):
            pass

    context = context_of(OtherEnd(), byte_tokenizer)
    trajectory = asyncio.run(run_trajectory(context, QUESTION, 0, seed=0, session="s"))
    assert trajectory.turns[0].text == "no" and trajectory.error is None
    assert len(trajectory.turns[0].token_ids) == 3
