"""The interface of tool-call formats, and the parts of a turn that several formats share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall

# A call in JSON, wherever it stands: its name, and then its arguments.
BARE_CALL = re.compile(r"\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:arguments|parameters)\"\s*:")


class CallFormat(ABC):
    """How a policy writes tool calls and thoughts into its turns.

    A subclass of your own is named in `tool_calls.format`, and made without arguments.

    Attributes:
        name: Name of the format, for messages.
        stop_strings: Strings that end a turn, beside the end-of-turn tokens of the chat template.
        markers: Texts with which untrusted text could forge a call, a thought, a role, or the end of a
            message. Control tokens of the tokenizer need not be among them.
        thought_tags: What opens and closes a thought.
        turn_ends: Control tokens that end a turn in this format, beside the one that the chat template
            writes; those that the tokenizer lacks do not count.
        writes_types: Whether arguments have JSON types; False: all of them are texts, which get the types of
            the tool's schema.
    """

    name: str
    stop_strings: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    thought_tags: tuple[str, str] = ("<think>", "</think>")
    turn_ends: tuple[str, ...] = ()
    writes_types: bool = True

    @abstractmethod
    def parse(self, text: str, opening: str) -> AssistantMessage:
        """Return what a turn says. It never raises.

        Args:
            text: The decoded sampled tokens, without the end-of-turn token.
            opening: What the chat template wrote at the beginning of the turn, such as "<think>\\n"; it is
                not part of `text`.

        Returns:
            The message. A call inside a thought is text. If a call cannot be read, the message has no calls,
            and its flaw says why, without markers: the policy reads it.
        """

    @abstractmethod
    def write_call(self, call: ToolCall) -> str:
        """Return a call as the policy writes it, without the end-of-turn token.

        Args:
            call: The call.
        """

    def write_turn(self, message: AssistantMessage, opening: str) -> str:
        """Return a turn as the policy writes it, without the end-of-turn token.

        Args:
            message: Thought, content and calls.
            opening: What the chat template wrote at the beginning of the turn.
        """
        calls = [self.write_call(call) for call in message.calls]
        body = "\n".join(part for part in (message.content, *calls) if part)
        return self.write_thought(message.thought, opening) + body

    def call_tokens(self) -> str:
        """Return a text with all control tokens of a call; the next one behind a call ends the turn."""
        return self.write_call(ToolCall("probe", {"probe": "probe"}))

    def thought_closing(self) -> str:
        """Return what ends a thought that has become too long."""
        return f"\n{self.thought_tags[1]}\n\n"

    def write_thought(self, thought: str, opening: str) -> str:
        """Return the thought of a turn as the policy writes it, with its tags.

        Args:
            thought: The thought; without one, and without an opening that begins one, nothing is written.
            opening: What the chat template wrote at the beginning of the turn.
        """
        open_tag, close_tag = self.thought_tags
        if close_tag in opening:
            return ""
        if open_tag in opening:
            return f"{thought}\n{close_tag}\n\n"
        if not thought:
            return ""
        return f"{open_tag}\n{thought}\n{close_tag}\n\n"


@dataclass(frozen=True)
class TurnParts:
    """A turn, split at thoughts and calls.

    Attributes:
        thought: Text of the thoughts, stripped.
        content: Text outside of thoughts and calls, stripped.
        bodies: Texts between the tags of the calls.
        flaw: Why the turn is not well formed; "" if it is.
        is_broken: Whether the flaw is one of a call or a thought, so that no call may be executed.
    """

    thought: str
    content: str
    bodies: tuple[str, ...]
    flaw: str = ""
    is_broken: bool = False


def split_turn(text: str, call_tags: tuple[str, str], thought_tags: tuple[str, str]) -> TurnParts:
    """Split a turn at its thoughts and calls, from left to right.

    What stands between the tags of a thought is no call, and what stands between the tags of a call is no
    thought. A thought without an end takes the rest of the turn. If a thought ends that was never opened, all
    before it was the thought.

    Args:
        text: The turn, with the opening that the chat template wrote.
        call_tags: What opens and closes a call.
        thought_tags: What opens and closes a thought.
    """
    open_call, close_call = call_tags
    open_thought, close_thought = thought_tags
    tag = re.compile("|".join(map(re.escape, (open_call, close_call, open_thought, close_thought))))
    thoughts: list[str] = []
    content: list[str] = []
    bodies: list[str] = []
    flaw = ""
    is_broken = False
    position = 0
    # Where a thought that was never opened ends.
    unopened_end = 0
    while match := tag.search(text, position):
        before = text[position : match.start()]
        position = match.end()
        content.append(before)
        if bodies and before.strip() and not flaw:
            flaw = "Text stands behind a call: nothing but calls may follow it."
        if match[0] == close_call:
            flaw = "The tag that closes a call stands without the tag that opens it."
            is_broken = True
            continue
        if match[0] == close_thought:
            unopened_end = match.start()
            thoughts = []
            content = []
            bodies = []
            flaw = "The tag that closes a thought stands without the tag that opens it."
            continue
        is_call = match[0] == open_call
        closing = close_call if is_call else close_thought
        end = text.find(closing, position)
        if end < 0:
            is_broken = True
            flaw = f"The {'call' if is_call else 'thought'} has no end: close its tag."
            thoughts.append("" if is_call else text[position:])
            position = len(text)
            break
        (bodies if is_call else thoughts).append(text[position:end])
        if bodies and not is_call and not flaw:
            flaw = "A thought stands behind a call: nothing but calls may follow it."
        position = end + len(closing)
    rest = text[position:]
    content.append(rest)
    if bodies and rest.strip() and not flaw:
        flaw = "Text stands behind the call: end the turn there."
    thoughts.insert(0, text[:unopened_end])
    thought = "\n".join(part.strip() for part in thoughts if part.strip())
    return TurnParts(thought, "".join(content).strip(), tuple(bodies), flaw, is_broken)


def make_message(parts: TurnParts, calls: Sequence[ToolCall], fault: str = "") -> AssistantMessage:
    """Return the message of a turn.

    Args:
        parts: The turn, split.
        calls: Its calls.
        fault: Why a call cannot be read; "" if all can.

    Returns:
        The message; without calls if one of them cannot be read, or the turn is broken.
    """
    if fault or parts.is_broken:
        return AssistantMessage(parts.thought, parts.content, (), fault or parts.flaw)
    return AssistantMessage(parts.thought, parts.content, tuple(calls), parts.flaw)


def write_json(value: Any) -> str:
    """Return a value as JSON, in the spelling of transformers' chat templates."""
    return json.dumps(value, ensure_ascii=False)
