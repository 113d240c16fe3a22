"""Formats whose calls begin without a tag, or with one: Llama's bare JSON, Mistral's [TOOL_CALLS]."""

from __future__ import annotations

import json
import re

from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import (
    BARE_CALL,
    CallFormat,
    TurnParts,
    make_message,
    write_json,
)
from calibadv_jax.protocols.call_json import CallError, read_arguments, read_call, read_json

_PYTHON_TAG = "<|python_tag|>"
# Beginning of a message that is meant as a call, with doubled braces too.
_BEGINS_CALL = re.compile(r"\{+\s*\"(?:name\"\s*:\s*\"|type\"\s*:\s*\"function\")")
_TOOL_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"


class LlamaJsonFormat(CallFormat):
    """Calls in bare JSON: Llama 3.1, 3.2, 3.3.

    A turn is a call if the whole of it, behind the thought, is ``{"name": …, "parameters": {…}}``. There is
    one call a turn.
    """

    name = "llama_json"
    markers = (
        *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        *(_PYTHON_TAG, "<think>", "</think>"),
    )
    turn_ends = ("<|eot_id|>", "<|eom_id|>")

    def parse(self, text: str, opening: str) -> AssistantMessage:
        parts = split_thought(opening + text, self.thought_tags)
        written = parts.content.removeprefix(_PYTHON_TAG).strip()
        if parts.is_broken or not _is_meant_as_call(parts.content):
            return make_message(parts, ())
        # The call is no content.
        parts = TurnParts(parts.thought, "", (), parts.flaw)
        try:
            return make_message(parts, (read_call(_read_only_value(written), "parameters"),))
        except CallError as error:
            return make_message(parts, (), str(error))

    def write_call(self, call: ToolCall) -> str:
        return f'{{"name": {write_json(call.name)}, "parameters": {write_json(call.arguments)}}}'


class MistralFormat(CallFormat):
    """Calls behind the control token [TOOL_CALLS]: Mistral and Magistral.

    Two forms are read: a list of ``{"name": …, "arguments": {…}}``, and for each call the token, the name,
    the token [ARGS] and the arguments. Ids of calls are ignored.
    """

    name = "mistral"
    markers = (
        *(_TOOL_CALLS, _CALL_ID, _ARGUMENTS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]"),
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
    )
    thought_tags = ("[THINK]", "[/THINK]")
    turn_ends = ("</s>",)

    def parse(self, text: str, opening: str) -> AssistantMessage:
        parts = split_thought(opening + text, self.thought_tags)
        content, *bodies = parts.content.split(_TOOL_CALLS)
        without_calls = TurnParts(parts.thought, content.strip(), (), parts.flaw, parts.is_broken)
        if not bodies and BARE_CALL.search(content):
            return make_message(
                without_calls, (), "A call stands without the token TOOL_CALLS: write it first."
            )
        try:
            calls = [call for body in bodies for call in _read_mistral(body)]
        except CallError as error:
            return make_message(without_calls, (), str(error))
        return make_message(without_calls, calls)

    def write_call(self, call: ToolCall) -> str:
        written = {"name": call.name, "arguments": call.arguments}
        return f"{_TOOL_CALLS}[{write_json(written)}]"

    def write_turn(self, message: AssistantMessage, opening: str) -> str:
        calls = ""
        if message.calls:
            written = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            calls = _TOOL_CALLS + write_json(written)
        return self.write_thought(message.thought, opening) + message.content + calls


def split_thought(text: str, thought_tags: tuple[str, str]) -> TurnParts:
    """Split a turn into its thoughts and the rest, for formats without tags around calls.

    Args:
        text: The turn, with the opening that the chat template wrote.
        thought_tags: What opens and closes a thought.

    Returns:
        The parts, without bodies of calls. A thought without an end takes the rest of the turn; if a thought
        ends that was never opened, all before it was the thought.
    """
    open_tag, close_tag = thought_tags
    before, opens, behind = text.partition(open_tag)
    if not opens:
        thought, closes, content = text.rpartition(close_tag)
        flaw = "The tag that closes a thought stands without the tag that opens it." if closes else ""
        return TurnParts(thought.strip(), content.strip(), (), flaw)
    thought, closes, content = behind.partition(close_tag)
    if not closes:
        flaw = "The thought has no end: close its tag."
        return TurnParts(thought.strip(), before.strip(), (), flaw, is_broken=True)
    if before.strip() or open_tag in content or close_tag in content:
        flaw = "The thought must stand once, at the beginning of the turn."
        return TurnParts(thought.strip(), f"{before}{content}".strip(), (), flaw, is_broken=True)
    return TurnParts(thought.strip(), content.strip(), ())


def _is_meant_as_call(content: str) -> bool:
    """Return whether a message of Llama is a call, or was meant as one."""
    if content.startswith(_PYTHON_TAG) or _BEGINS_CALL.match(content):
        return True
    if not content.startswith("{"):
        return False
    try:
        value = read_json(content)
    except CallError:
        return False
    return isinstance(value, dict) and value.keys() >= {"name", "parameters"}


def _read_only_value(text: str) -> object:
    """Return the JSON value of a text, with a message of its own if more follows it."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return read_json(text)
    if text[end:].strip():
        raise CallError("Text stands behind the call: write one call alone, and end the turn there.")
    return read_json(text)


def _read_mistral(body: str) -> list[ToolCall]:
    """Return the calls behind a [TOOL_CALLS]."""
    name, has_arguments, arguments = body.partition(_ARGUMENTS)
    if has_arguments:
        name = name.partition(_CALL_ID)[0].strip()
        if not name:
            raise CallError("The call has no name: write it before the token ARGS.")
        return [ToolCall(name, read_arguments(_read_only_value(arguments.strip())))]
    values = _read_only_value(body.strip())
    if not isinstance(values, list) or not values:
        raise CallError('The calls are no list: write [{"name": …, "arguments": {…}}].')
    return [read_call(value, "arguments") for value in values]
