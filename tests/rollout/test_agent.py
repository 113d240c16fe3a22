"""The turn loop: exact spans, every limit, and text that tries to act for the environment."""

import asyncio
from copy import deepcopy

import numpy as np
import pytest
from loop_fakes import DOCUMENT, EOS, QUESTION, Loop, context_of

from calibadv_jax.config import PromptConfig, RewardConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Completion
from calibadv_jax.core.tags import INVALID_ACTION, STOP_STRINGS
from calibadv_jax.core.trajectory import Group
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.agent import run_trajectory, turn_seed

SEARCH = "<think> a </think>\n<search> ann </search>"
ANSWER = "<think> b </think>\n<answer> Ann </answer>"
SHOWN = '\n\n<information>Doc 1(Title: "Ann") Ann is a painter.</information>\n\n'
THINK = PromptConfig(template="short", prepend_think=True)


def num_tokens(loop, *texts):
    return sum(len(loop.tokenizer.encode(text)) for text in texts)


def kinds(trajectory):
    return [turn.kind for turn in trajectory.turns]


def test_search_read_answer(loop):
    trajectory = loop(SEARCH, ANSWER, index=2)
    search, answer = trajectory.turns
    assert (search.kind, search.think, search.query, search.text) == ("search", "a", "ann", SEARCH)
    assert (search.documents, search.observation_text) == ((DOCUMENT,), SHOWN)
    assert (answer.kind, answer.think, answer.answer, answer.text) == ("answer", "b", "Ann", ANSWER)
    assert (answer.documents, answer.observation_text, answer.stop_reason) == ((), "", "stop")
    assert trajectory.question is QUESTION and trajectory.index == 2
    assert trajectory.answer == "Ann"
    assert trajectory.policy_versions == (3, 4)
    assert loop.retriever.queries == ["ann"]
    assert loop.sampler.released == ["s"]


@pytest.mark.parametrize("by_letter", [False, True])
def test_prompt_and_response_are_the_samplers_tokens(loop, by_letter):
    """Also where encoding the text anew would give other tokens."""
    trajectory = loop(SEARCH, SEARCH, ANSWER, by_letter=by_letter)
    canonical = loop.tokenizer.encode(SEARCH) == trajectory.turns[0].token_ids.tolist()
    assert canonical is not by_letter
    everything = [*trajectory.prompt_ids, *trajectory.response_ids]
    written = loop.sampler.written["s"]
    for (_, context, _), completion in zip(loop.sampler.calls, written, strict=True):
        assert everything[: len(context)] == list(context)
        assert everything[len(context) : len(context) + len(completion.token_ids)] == completion.token_ids
    assert loop.text(everything) == f"Question: Who?\n{SEARCH}{SHOWN}{SEARCH}{SHOWN}{ANSWER}"


def test_token_past_the_tag_stays_as_sampled(loop):
    trajectory = loop(SEARCH + "\n", ANSWER + "\n")
    search, answer = trajectory.turns
    assert loop.text(search.token_ids[-1:]) == ">\n"
    assert (search.query, search.text) == ("ann", SEARCH + "\n")
    assert (answer.answer, answer.text) == ("Ann", ANSWER + "\n")
    assert loop.text(trajectory.response_ids) == f"{SEARCH}\n{SHOWN}{ANSWER}\n"


def test_what_is_asked_of_the_sampler(loop):
    loop(SEARCH, ANSWER, temperature=0.5, top_p=0.9, top_k=7, max_turn_length=50, seed=11, index=3)
    for number, (session, _, sampling) in enumerate(loop.sampler.calls):
        assert session == "s"
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.max_tokens, sampling.stop) == (50, STOP_STRINGS)
        assert sampling.seed == turn_seed(11, "q7", 3, number)


def test_seeds_are_stable_and_depend_on_everything():
    assert turn_seed(1, "q", 2, 3) == turn_seed(1, "q", 2, 3) == 3529055998
    others = [turn_seed(*case) for case in ((0, "q", 2, 3), (1, "p", 2, 3), (1, "q", 0, 3), (1, "q", 2, 0))]
    assert len({turn_seed(1, "q", 2, 3), *others}) == 5
    assert all(0 <= seed < 2**32 for seed in others)


def test_after_the_last_search_comes_one_turn_without_retrieval(loop):
    trajectory = loop(SEARCH, SEARCH, SEARCH, max_searches=2)
    assert kinds(trajectory) == ["search"] * 3
    assert [len(turn.observation_ids) > 0 for turn in trajectory.turns] == [True, True, False]
    final = trajectory.turns[-1]
    assert (final.query, final.documents, final.observation_text) == ("ann", (), "")
    assert loop.retriever.queries == ["ann"] * 2
    assert trajectory.answer is None


def test_final_turn_may_answer(loop):
    assert loop(SEARCH, ANSWER, max_searches=1).answer == "Ann"


@pytest.mark.parametrize("text", ["prose" + EOS, "<think> a </think><search> </search>", "</search>"])
def test_invalid_action_ends_the_trajectory(loop, text):
    trajectory = loop(text, ANSWER)
    assert kinds(trajectory) == ["invalid"]
    assert not trajectory.turns[0].observation_ids.size
    assert trajectory.mask.all()


@pytest.mark.parametrize("prompt", [PromptConfig(template="short"), THINK])
def test_invalid_action_may_be_retried(loop, prompt):
    trajectory = loop("prose" + EOS, ANSWER, on_invalid="retry", prompt=prompt)
    assert kinds(trajectory) == ["invalid", "answer"]
    notice = INVALID_ACTION + "<think>" * prompt.prepend_think
    assert trajectory.turns[0].observation_text == notice
    assert loop.text(trajectory.response_ids) == f"prose{EOS}{notice}{ANSWER}"
    assert loop.text(trajectory.response_ids[~trajectory.mask]) == notice
    assert loop.retriever.queries == []


@pytest.mark.parametrize("prepend_think", [False, True])
def test_first_turn_continues_thought_of_template(byte_tokenizer, prepend_think):
    tokenizer = deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}{{ '<|im_end|><think>\\n' }}"
    loop = Loop(tokenizer)
    later = SEARCH.removeprefix("<think>" * prepend_think)
    trajectory = loop(
        SEARCH.removeprefix("<think>"),
        later,
        ANSWER.removeprefix("<think>" * prepend_think),
        prompt=PromptConfig(template="short", prepend_think=prepend_think),
    )
    assert loop.text(trajectory.prompt_ids) == "Question: Who?\n<|im_end|><think>\n"
    assert [turn.think for turn in trajectory.turns] == ["a", "a", "b"]
    assert trajectory.opening_of(0) == "<think>\n"
    assert trajectory.opening_of(1) == trajectory.opening_of(2) == "<think>" * prepend_think
    (group,) = score_groups([Group(QUESTION, [trajectory])], RewardConfig(), np.random.default_rng(0))
    assert group.trajectories[0].format_valid and group.trajectories[0].answer_score == 1


def test_authors_words_for_an_invalid_action():
    assert INVALID_ACTION == (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
        "</search>. If I want to give the final answer, I should put the answer between <answer> and "
        "</answer>. Let me try again.\n"
    )


def test_retries_count_against_the_turns(loop):
    trajectory = loop(*["prose" + EOS] * 3, on_invalid="retry", max_searches=2)
    assert kinds(trajectory) == ["invalid"] * 3
    assert [turn.observation_text != "" for turn in trajectory.turns] == [True, True, False]


@pytest.mark.parametrize("on_invalid", ["end", "retry"])
def test_turn_cut_by_its_length_ends_the_trajectory(loop, on_invalid):
    trajectory = loop("<think> going on and on", ANSWER, max_turn_length=10, on_invalid=on_invalid)
    (turn,) = trajectory.turns
    assert (turn.kind, turn.stop_reason, turn.text) == ("unfinished", "length", "<think> go")


def test_end_of_text_is_trained_not_read(loop):
    (turn,) = loop("I do not know" + EOS).turns
    assert (turn.text, turn.stop_reason) == ("I do not know", "eos")
    assert loop.text(turn.token_ids) == "I do not know" + EOS


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


def test_last_turn_gets_what_is_left_of_the_length(loop):
    before = num_tokens(loop, "Question: Who?\n", SEARCH, SHOWN)
    trajectory = loop(SEARCH, "x" * 99, max_length=before + 7, max_prompt_length=20)
    assert [call[2].max_tokens for call in loop.sampler.calls] == [before + 7 - 15, 7]
    assert kinds(trajectory) == ["search", "unfinished"]
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) == before + 7


def test_observation_leaves_room_for_a_token_or_ends_the_trajectory(loop):
    before = num_tokens(loop, "Question: Who?\n", SEARCH, SHOWN)
    assert len(loop(SEARCH, "xx", max_length=before + 1, max_prompt_length=20).turns) == 2
    (turn,) = loop(SEARCH, max_length=before, max_prompt_length=20).turns
    assert turn.kind == "search" and not turn.observation_text
    assert len(turn.documents) == len(turn.observation_ids) == 0


def test_nothing_is_retrieved_where_nothing_can_be_shown(loop):
    full = num_tokens(loop, "Question: Who?\n", SEARCH)
    trajectory = loop(SEARCH, max_length=full, max_prompt_length=20)
    assert kinds(trajectory) == ["search"]
    assert loop.retriever.queries == []


def test_prepended_thought_belongs_to_the_environment(loop):
    trajectory = loop(" a </think><search>ann</search>", " b </think><answer>Ann</answer>", prompt=THINK)
    assert [turn.think for turn in trajectory.turns] == ["a", "b"]
    assert loop.text(trajectory.prompt_ids).endswith("<think>")
    assert loop.text(trajectory.response_ids[~trajectory.mask]) == SHOWN + "<think>"


def test_search_that_finds_nothing_says_so(loop):
    trajectory = loop(SEARCH, ANSWER, documents={})
    search = trajectory.turns[0]
    assert search.observation_text == "\n\n<information>No results found.</information>\n\n"
    assert loop.text(search.observation_ids) == search.observation_text
    assert (search.documents, search.is_refused) == ((), False)
    assert kinds(trajectory) == ["search", "answer"]


@pytest.mark.parametrize("failure", [UserError("retriever is down"), asyncio.CancelledError()])
def test_session_is_released_whatever_happens(loop, failure, monkeypatch):
    async def fail(self, queries):
        raise failure

    monkeypatch.setattr("loop_fakes.DictRetriever.search", fail)
    with pytest.raises(type(failure)):
        loop(SEARCH)
    assert loop.sampler.released == ["s"]
