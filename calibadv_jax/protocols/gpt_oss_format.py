"""The format of gpt-oss: a turn is a series of messages in channels."""

from __future__ import annotations

import re

from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import CallFormat, TurnParts, make_message, write_json
from calibadv_jax.protocols.call_json import CallError, read_arguments, read_json

_MESSAGE = "<|message|>"
_END = "<|end|>"
_NEXT_MESSAGE = "<|start|>assistant"
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CONTROL = re.compile(r"<\|(?:start|end|message|channel|constrain|call|return)\|>")


class GptOssFormat(CallFormat):
    """Messages in channels: gpt-oss.

    The channel "analysis" holds thoughts and "final" the answer. A message of the channel "commentary" to
    the recipient "functions.NAME" is a call, and ends the turn. There is one call a turn.
    """

    name = "gpt_oss"
    markers = (
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        *("<|constrain|>", "<|call|>", "<|return|>"),
    )
    thought_tags = (f"<|channel|>analysis{_MESSAGE}", _END)
    turn_ends = ("<|call|>", "<|return|>")

    def parse(self, text: str, opening: str) -> AssistantMessage:
        thoughts: list[str] = []
        contents: list[str] = []
        messages, fault = _split_messages(opening + text)
        calls: list[ToolCall] = []
        for index, (header, body) in enumerate(messages):
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if channel is None:
                fault = fault or "A message has no channel: it is analysis, commentary or final."
            elif recipient is not None:
                is_last = index == len(messages) - 1
                try:
                    calls.append(_read_call(recipient[1], channel[1], body, is_last))
                except CallError as error:
                    fault = fault or str(error)
            elif channel[1] == "analysis":
                thoughts.append(body.strip())
            else:
                contents.append(body.strip())
        thought = "\n".join(part for part in thoughts if part)
        content = "\n".join(part for part in contents if part)
        if not calls and not contents:
            fault = fault or "The turn has no message in the channel final, and no call."
        return make_message(TurnParts(thought, content, ()), calls, fault)

    def write_call(self, call: ToolCall) -> str:
        header = f" to={_FUNCTIONS}{call.name}<|channel|>commentary json{_MESSAGE}"
        return header + write_json(call.arguments)

    def write_turn(self, message: AssistantMessage, opening: str) -> str:
        thought = self.write_thought(message.thought, opening)
        if message.calls:
            return thought + "".join(self.write_call(call) for call in message.calls)
        return f"{thought}<|channel|>final{_MESSAGE}{message.content}"

    def thought_closing(self) -> str:
        return _END + _NEXT_MESSAGE

    def write_thought(self, thought: str, opening: str) -> str:
        if not thought:
            return ""
        return f"<|channel|>analysis{_MESSAGE}{thought}{_END}{_NEXT_MESSAGE}"


def _split_messages(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return header and body of each message of a turn, and why it is not well formed.

    Args:
        text: The turn, which begins within the header of its first message.
    """
    messages: list[tuple[str, str]] = []
    remaining = text
    while True:
        header, has_body, behind = remaining.partition(_MESSAGE)
        if not has_body:
            return messages, "A message has no text behind its channel."
        body, ends, remaining = behind.partition(_END)
        if _CONTROL.search(body):
            return messages, "A message has no end before the next."
        messages.append((header, body))
        if not ends or not remaining.strip():
            return messages, ""
        if not remaining.startswith(_NEXT_MESSAGE):
            return (
                messages,
                "A turn has messages of the assistant alone.",
            )
        remaining = remaining.removeprefix(_NEXT_MESSAGE)


def _read_call(recipient: str, channel: str, body: str, is_last: bool) -> ToolCall:
    """Return the call that a message with a recipient makes."""
    if channel != "commentary":
        raise CallError(f"A call stands in the channel {channel}: write it in the channel commentary.")
    if not recipient.startswith(_FUNCTIONS) or recipient == _FUNCTIONS:
        raise CallError(f"The recipient {recipient[:60]} is no tool: write to={_FUNCTIONS}NAME.")
    if not is_last:
        raise CallError("Text stands behind a call: end the turn there.")
    return ToolCall(recipient.removeprefix(_FUNCTIONS), read_arguments(read_json(body)))
