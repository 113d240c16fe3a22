"""Random conversations in templates after public ones: the rollout's tokens are those of the template.

Where a template is known to write earlier turns in another way, exactly that is expected.
"""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from template_rig import FAMILIES, OPEN_PAGE, SEARCH, family_template

from calibadv_jax.core.tokens import decode
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.rendering import tool_message, user_message
from calibadv_jax.protocols.template_check import Exchange, rollout_segments

CONVERSATIONS = 1000
# Templates that show thoughts, and those that show a text beside a call.
THINKING = {"qwen3", "forgetful", "qwen3_5", "nemotron", "magistral", "gpt_oss"}
WITH_TEXT = {"qwen2_5", "qwen3", "forgetful", "qwen3_5", "magistral"}
WORDS = (
    *("Ann", "painted", "1889", "caf\u00e9", "\u6f22\u5b57", "\U0001f600", "a b", "x\ny", "e\n\nf", "1.5"),
    *('"quoted"', "back\\slash", "{curly}", "[1]", "<b>", "'", "https://example.org/?q=1&r=2", "null", "7"),
)
IN_THOUGHT = '<tool_call>\n{"name": "search", "arguments": {"query": "no"}}\n</tool_call>'
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
THOUGHT = {
    "forgetful": re.compile(r"<think>\n.*?\n</think>\n\n", re.DOTALL),
    "gpt_oss": re.compile(r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant", re.DOTALL),
}


def some_text(rng, most=5):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most))).strip()


def some_call(rng):
    if rng.random() < 0.3:
        return ToolCall(OPEN_PAGE.name, {"address": some_text(rng, 1)})
    arguments = {"query": some_text(rng)}
    if rng.random() < 0.4:
        arguments["top"] = rng.randint(1, 99)
    return ToolCall(SEARCH.name, arguments)


def some_conversation(rng, name, template):
    """Return turns with calls and their answers, and mostly a last turn without a call."""
    thinks = name in THINKING and rng.random() < 0.7
    exchanges = []
    is_ended = rng.random() < 0.8
    turns_with_calls = rng.randint(0 if is_ended else 1, 3)
    for _ in range(turns_with_calls):
        calls = tuple(
            some_call(rng) for _ in range(rng.randint(1, 3) if template.allows_several_calls else 1)
        )
        answers = tuple(f"answer {rng.random()}: {some_text(rng)}" for _ in calls)
        content = some_text(rng) if name in WITH_TEXT and rng.random() < 0.3 else ""
        exchanges.append(Exchange(AssistantMessage(some_thought(rng, name, thinks), content, calls), answers))
    if is_ended:
        exchanges.append(Exchange(AssistantMessage(some_thought(rng, name, thinks), some_text(rng), ())))
    return exchanges


def some_thought(rng, name, thinks):
    """Return a thought, which may hold a call as text."""
    if not thinks or rng.random() < 0.1:
        return ""
    thought = some_text(rng)
    if name in ("qwen3", "forgetful", "qwen3_5", "nemotron") and rng.random() < 0.2:
        thought = f"{thought}\n{IN_THOUGHT}\nno."
    return thought


def rewritten(name, turn, message, is_last, is_ended):
    """Return how a template writes a turn of the rollout in the whole conversation."""
    if name == "qwen3" and not is_last:
        return turn.replace(EMPTY_THOUGHT, "", 1) if turn.startswith(EMPTY_THOUGHT) else turn
    if name == "forgetful" and not is_last:
        return THOUGHT[name].sub("", turn, count=1)
    if name == "gpt_oss" and not is_last and is_ended:
        return THOUGHT[name].sub("", turn, count=1)
    if name == "nemotron" and not message.thought:
        spelled = turn.replace(EMPTY_THOUGHT, "<think></think>", 1)
        return spelled.replace("</tool_call><|im_end|>", "</tool_call>\n<|im_end|>")
    return turn


def joins_tokens(before, sampled):
    """Whether the tokenizer joins line breaks on both sides of the beginning of a turn."""
    return before.text.endswith("\n") and sampled.text.startswith("\n")


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_rollout_has_the_tokens_of_the_templates_rendering(name):
    template = family_template(name)
    rng = random.Random(f"tool calls {name}")
    exact = 0
    for _ in range(CONVERSATIONS):
        prompt = [user_message(some_text(rng))]
        if rng.random() < 0.5:
            prompt.insert(0, {"role": "system", "content": some_text(rng)})
        exchanges = some_conversation(rng, name, template)
        segments = rollout_segments(template, prompt, exchanges)
        messages = list(prompt)
        for exchange in exchanges:
            messages.append(template.chat_message(exchange.message))
            for index, call in enumerate(exchange.message.calls):
                messages.append(tool_message(call, index, exchange.answers[index]))
        whole = template.renderer.render(messages, opens_turn=bool(exchanges[-1].answers))

        # Text: what the template writes, or exactly what it is known to write instead.
        is_ended = not exchanges[-1].answers
        expected = ""
        opening = ""
        sampled = [segment for segment in segments if segment.is_sampled]
        turns = iter(zip(sampled, exchanges, strict=True))
        for segment in segments:
            if not segment.is_sampled:
                expected += segment.text.removesuffix(segment.opening)
                opening = segment.opening
                continue
            _, exchange = next(turns)
            is_last = exchange is exchanges[-1] and is_ended
            expected += rewritten(name, opening + segment.text, exchange.message, is_last, is_ended)
            opening = ""
        # Behind the last turn, some templates begin what separates it from the next message.
        assert whole.removeprefix(expected + opening) in (("", "\n") if is_ended else ("",))

        # Tokens: those of the whole text, unless it differs or the tokenizer joins line breaks.
        ids = np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments])
        text = "".join(segment.text for segment in segments)
        pairs = zip(segments, segments[1:], strict=False)
        if whole.startswith(text) and not any(joins_tokens(*pair) for pair in pairs):
            assert ids.tolist() == template.renderer.encode(text)
            exact += 1
        assert decode(template.renderer.tokenizer, ids.tolist()) == text

        # The mask covers what the policy sampled: each turn reads as its whole message.
        mask = np.concatenate([np.full(len(segment.token_ids), segment.is_sampled) for segment in segments])
        masked = decode(template.renderer.tokenizer, ids[mask].tolist())
        assert masked == "".join(segment.text for segment in sampled)
        opening = segments[0].opening
        for segment, exchange in zip(sampled, exchanges, strict=True):
            end = template.end_of_call if exchange.message.calls else template.end_of_answer
            assert segment.text.endswith(end)
            assert template.parse(segment.text.removesuffix(end), opening) == exchange.message
            opening = template.opening
    assert exact > CONVERSATIONS / 10
