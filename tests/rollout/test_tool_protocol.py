"""Trajectories with tool calls: what is executed, in which order it is answered, and what is trained."""

from __future__ import annotations

import asyncio

import pytest
from loop_fakes import DOCUMENT, QUESTION, DictRetriever, ScriptedSampler
from tools_rig import END, THINKING_TEMPLATE, call_text, chat_tokenizer

from calibadv_jax.config import PromptConfig, RolloutConfig, ToolCallsConfig
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import Document
from calibadv_jax.rewards.score import format_flaw
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory

BOB = Document("d2", "Bob", "Bob is a poet.")
DOCUMENTS = {"ann": [DOCUMENT], "bob": [BOB]}


@pytest.fixture(scope="session")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="session")
def thinking_tokenizer():
    return chat_tokenizer(THINKING_TEMPLATE)


def run(tokenizer, *turns, actions=(), answer_from="whole", prompt=None, tool_calls=None, **limits):
    """The trajectory of scripted turns, and its sampler."""
    sampler = ScriptedSampler(tokenizer, lambda _, turn: turns[turn])
    context = RolloutContext(
        sampler,
        DictRetriever(DOCUMENTS),
        tokenizer,
        RolloutConfig(protocol="tool_calls", **limits),
        prompt or PromptConfig(),
        tuple(actions),
        tool_calls=tool_calls or ToolCallsConfig(),
        answer_from=answer_from,
    )
    return asyncio.run(run_trajectory(context, QUESTION, 0, 0, "s")), sampler


def kinds(trajectory):
    return [turn.kind for turn in trajectory.turns]


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


SEARCH = call_text(query="ann") + END


def test_conversation_is_the_templates_own(tokenizer):
    trajectory, sampler = run(tokenizer, SEARCH, "Ann" + END)
    assert kinds(trajectory) == ["search", "answer"] and trajectory.answer == "Ann"
    search = trajectory.turns[0]
    assert search.calls == (ToolCall("search", {"query": "ann"}),)
    assert (search.query, search.documents) == ("ann", (DOCUMENT,))
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "ann"}}}
    shown = 'Doc 1(Title: "Ann") Ann is a painter.'
    prompt = text_of(tokenizer, trajectory.prompt_ids)
    whole = prompt + text_of(tokenizer, trajectory.response_ids)
    system = prompt.split("system\n")[1].split("\n\nTools")[0]
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": shown},
        {"role": "assistant", "content": "Ann"},
    ]
    tools = [action.schema().as_function() for action in (SearchLike(),)]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered == whole + "\n"
    assert not format_flaw(trajectory)
    sampled = [token for completion in sampler.written["s"] for token in completion.token_ids]
    assert trajectory.response_ids[trajectory.mask].tolist() == sampled


class SearchLike(Action):
    name, purpose, argument = "search", "search", "query"
    description = "Search for passages; they come best first. A short query of a few words works best."

    async def call(self, argument):
        return Reply()
