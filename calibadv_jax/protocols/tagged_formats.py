"""Formats whose calls stand between <tool_call> and </tool_call>: JSON (Hermes, Qwen), and Qwen's XML."""

from __future__ import annotations

import re

from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import (
    BARE_CALL,
    CallFormat,
    TurnParts,
    make_message,
    split_turn,
    write_json,
)
from calibadv_jax.protocols.call_json import CallError, read_call, read_json

CALL_TAGS = ("<tool_call>", "</tool_call>")
# Tags of messages and lists in the templates of these models.
_COMMON_MARKERS = (
    *CALL_TAGS,
    *("<tool_response>", "</tool_response>"),
    *("<tools>", "</tools>"),
    *("<think>", "</think>"),
    *("<|im_start|>", "<|im_end|>"),
)
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)
_XML_FORM = (
    "it needs a tag function=NAME, and within it a tag parameter=ARGUMENT for each argument, all closed"
)


class HermesFormat(CallFormat):
    """Calls in JSON between tags: Hermes, Qwen2.5, Qwen3.

    A call has three lines: the tag, ``{"name": …, "arguments": {…}}``, and the closing tag.
    """

    name = "hermes"
    markers = _COMMON_MARKERS

    def parse(self, text: str, opening: str) -> AssistantMessage:
        parts = split_turn(opening + text, CALL_TAGS, self.thought_tags)
        if not parts.bodies and not parts.flaw and BARE_CALL.search(parts.content):
            return _outside_of_tags(parts)
        calls = []
        for body in parts.bodies:
            try:
                calls.append(read_call(read_json(body), "arguments"))
            except CallError as error:
                return make_message(parts, (), str(error))
        return make_message(parts, calls)

    def write_call(self, call: ToolCall) -> str:
        arguments = write_json(call.arguments)
        return f'<tool_call>\n{{"name": {write_json(call.name)}, "arguments": {arguments}}}\n</tool_call>'


class QwenXmlFormat(CallFormat):
    """Calls in XML: Qwen3.5, Qwen3-Coder, Nemotron.

    Between the tags of a call stands ``<function=NAME>`` with a ``<parameter=ARGUMENT>`` for each argument.
    Values are texts, which get the types of the tool's schema.
    """

    name = "qwen_xml"
    markers = (*_COMMON_MARKERS, "<function=", "</function>", "<parameter=", "</parameter>", "<IMPORTANT>")
    writes_types = False

    def parse(self, text: str, opening: str) -> AssistantMessage:
        parts = split_turn(opening + text, CALL_TAGS, self.thought_tags)
        is_bare = "<function=" in parts.content or BARE_CALL.search(parts.content)
        if not parts.bodies and not parts.flaw and is_bare:
            return _outside_of_tags(parts)
        calls = []
        for body in parts.bodies:
            try:
                calls.append(_read_xml(body))
            except CallError as error:
                return make_message(parts, (), str(error))
        return make_message(parts, calls)

    def write_call(self, call: ToolCall) -> str:
        lines = ["<tool_call>", f"<function={call.name}>"]
        for name, value in call.arguments.items():
            written = value if isinstance(value, str) else write_json(value)
            lines += [f"<parameter={name}>", written, "</parameter>"]
        lines += ["</function>", "</tool_call>"]
        return "\n".join(lines)


def _outside_of_tags(parts: TurnParts) -> AssistantMessage:
    return make_message(
        parts, (), "A call stands outside of the tags of a call: write it between tool_call tags."
    )


def _read_xml(body: str) -> ToolCall:
    """Return the call between the tags of a call."""
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise CallError(f"The call names no function: {_XML_FORM}.")
    name, inside = function.groups()
    arguments: dict[str, str] = {}
    position = 0
    while parameter := _PARAMETER.match(inside, position):
        argument, value = parameter.groups()
        if argument.strip() in arguments:
            raise CallError(f'The call has the argument "{argument.strip()}" twice.')
        arguments[argument.strip()] = value.removeprefix("\n").removesuffix("\n")
        position = parameter.end()
    if inside[position:].strip():
        raise CallError(f"The call holds text that is no argument: {_XML_FORM}.")
    return ToolCall(name.strip(), arguments)
