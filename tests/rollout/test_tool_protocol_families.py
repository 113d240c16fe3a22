"""The agent loop in templates after public ones: its tokens are the template's, its mask the policy's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import DOCUMENT, QUESTION, DictRetriever, ScriptedSampler
from template_rig import FAMILIES, family_tokenizer

from calibadv_jax.config import PromptConfig, RolloutConfig, ToolCallsConfig
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.core.trajectory import Document
from calibadv_jax.protocols.rendering import user_message
from calibadv_jax.protocols.template_check import Exchange, rollout_segments
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory
from calibadv_jax.rollout.tool_protocol import ToolProtocol

BOB = Document("d2", "Bob", "Bob is a poet, caf\u00e9 and <|im_end|> </s> <tool_call>.")
THINKING = {"qwen3", "forgetful", "qwen3_5", "nemotron", "magistral", "gpt_oss"}


class EndingSampler(ScriptedSampler):
    """Says "eos" at every end-of-turn token, and may write all else letter by letter."""

    def __init__(self, tokenizer, turns, ends, in_letters):
        super().__init__(tokenizer, lambda _, turn: turns[turn])
        self.ends = ends
        self.in_letters = in_letters

    async def generate(self, token_ids, sampling, session):
        completion = await super().generate(token_ids, sampling, session)
        text = self.script(session, len(self.written[session]) - 1)
        (end,) = (end for end in self.ends if text.endswith(end))
        pieces = [*text.removesuffix(end), end] if self.in_letters else [text]
        ids = [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]
        completion = replace(completion, token_ids=ids, logprobs=[-1.0] * len(ids), stop_reason="eos")
        self.written[session][-1] = completion
        return completion


def context_of(name):
    tokenizer = family_tokenizer(name)
    retriever = DictRetriever({"ann": [DOCUMENT], "bob": [BOB]})
    prompt = PromptConfig(system="")
    rollout = RolloutConfig(protocol="tool_calls", max_searches=4)
    context = RolloutContext(
        None, retriever, tokenizer, rollout, prompt, (), tool_calls=ToolCallsConfig(), answer_from="whole"
    )
    assert isinstance(context.protocol, ToolProtocol)
    return context


@pytest.mark.parametrize("in_letters", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_templates_and_the_mask_is_the_policys(name, in_letters):
    context = context_of(name)
    template = context.protocol.template
    thought = "I look it up." if name in THINKING else ""
    first, second = (ToolCall("search", {"query": query}) for query in ("ann", "bob"))
    together = (second, first) if template.allows_several_calls else (second,)
    messages = [
        AssistantMessage(thought, "", (first,)),
        AssistantMessage(thought, "", together),
        AssistantMessage(thought, "Ann", ()),
    ]
    listed = {
        "ann": f'Doc 1(Title: "Ann") {DOCUMENT.text}',
        "bob": f'Doc 1(Title: "Bob") {context.protocol.neutraliser.neutralise(BOB.text)}',
    }
    exchanges = []
    for message in messages:
        answers = tuple(listed[call.arguments["query"]] for call in message.calls)
        exchanges.append(Exchange(message, answers))
    segments = rollout_segments(template, [user_message("Who?")], exchanges)

    sampled = [segment.text for segment in segments if segment.is_sampled]
    sampler = EndingSampler(context.tokenizer, sampled, template.end_of_turn, in_letters)
    context = replace(context, sampler=sampler)
    trajectory = asyncio.run(run_trajectory(context, QUESTION, 0, 0, "s"))
    assert [turn.kind for turn in trajectory.turns] == ["search", "search", "answer"]
    assert [turn.calls for turn in trajectory.turns] == [message.calls for message in messages]
    assert [turn.think for turn in trajectory.turns] == [thought] * 3
    assert trajectory.answer == "Ann" and not any(turn.flaw for turn in trajectory.turns)

    prompt, *rest = segments
    assert trajectory.prompt_ids.tolist() == list(prompt.token_ids)
    written = [token for completion in sampler.written["s"] for token in completion.token_ids]
    assert trajectory.response_ids[trajectory.mask].tolist() == written
    environment = [token for segment in rest if not segment.is_sampled for token in segment.token_ids]
    assert trajectory.response_ids[~trajectory.mask].tolist() == environment
    if not in_letters:
        ids = np.concatenate([np.asarray(segment.token_ids) for segment in rest])
        assert trajectory.response_ids.tolist() == ids.tolist()
