"""A tool-call format of one's own: that of GLM, with a tag for the name and the value of each argument.

PYTHONPATH=. calibadv train --config FILE rollout.protocol=tool_calls \\
    tool_calls.format=examples.own_format:GlmFormat
"""

from __future__ import annotations

import re

from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import CallFormat, make_message, split_turn, write_json

ARGUMENT = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class GlmFormat(CallFormat):
    """Between the tags of a call: its name, and a key and a value for each argument, each on its own line."""

    name = "glm"
    # With these, a document could forge a call; it never shows them. Control tokens need not be listed.
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    # Values are texts: "3" becomes 3 where the tool's schema wants a number.
    writes_types = False

    def parse(self, text: str, opening: str) -> AssistantMessage:
        """Calls in a thought are text, which `split_turn` sees to."""
        parts = split_turn(opening + text, ("<tool_call>", "</tool_call>"), self.thought_tags)
        calls = []
        for body in parts.bodies:
            name = body.partition("<arg_key>")[0]
            arguments = ARGUMENT.findall(body)
            if not name.strip() or ARGUMENT.sub("", body.removeprefix(name)).strip():
                return make_message(
                    parts, (), "A call has a name, and then a key and a value for each argument."
                )
            calls.append(ToolCall(name.strip(), {key.strip(): value for key, value in arguments}))
        return make_message(parts, calls)

    def write_call(self, call: ToolCall) -> str:
        """The start finds out with it where a call ends and the end of the turn begins."""
        lines = [f"<tool_call>{call.name}"]
        for key, value in call.arguments.items():
            written = value if isinstance(value, str) else write_json(value)
            lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{written}</arg_value>"]
        return "\n".join([*lines, "</tool_call>"])
