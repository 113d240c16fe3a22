"""The format that a tokenizer describes itself, in the response template of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calibadv_jax.core.errors import UserError, one_line
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import CallFormat, write_json
from calibadv_jax.protocols.call_json import CallError, read_call
from calibadv_jax.protocols.probes import NoCallShown, written_call
from calibadv_jax.protocols.rendering import STYLES, TemplateFailure, TemplateRenderer

_CALLS = "tool_calls"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Keys of a field of a response template that hold markup.
_DELIMITERS = ("open", "close", "open_pattern", "close_pattern")


class SchemaFormat(CallFormat):
    """Calls as the method parse_response of transformers' tokenizers reads them.

    The markers are those that the response template writes out; patterns in it do not count. Texts behind a
    call are no flaw, since the parser does not say where they stood.
    """

    name = "schema"
    writes_types = False

    def __init__(self, renderer: TemplateRenderer):
        """Take the response template of a tokenizer.

        Args:
            renderer: The tokenizer's chat template, which writes the calls.

        Raises:
            UserError: The tokenizer has none.
        """
        if not self.is_described(renderer.tokenizer):
            raise UserError(
                f"tool_calls.format is schema, but {renderer.title} has no response_template, as transformers"
                " calls it; choose another format"
            )
        self._renderer = renderer
        fields: dict[str, dict[str, Any]] = renderer.tokenizer.response_template["fields"]
        self.markers = tuple(dict.fromkeys(_literals(fields.values())))
        self._call_field = fields.get(_CALLS, {})
        # The end of the turn, which closes contents, and in some response templates calls too.
        content_end = _delimiters(fields.get("content", {}))
        self._turn_end = next((token for token in renderer.control_tokens if token in content_end), "")
        for name in _THOUGHTS:
            opens, closes = fields.get(name, {}).get("open"), fields.get(name, {}).get("close")
            if isinstance(opens, str) and isinstance(closes, str):
                self.thought_tags = (opens, closes)

    @staticmethod
    def is_described(tokenizer: Any) -> bool:
        """Return whether a tokenizer has a response template with tool calls."""
        described = getattr(tokenizer, "response_template", None)
        return isinstance(described, dict) and _CALLS in described.get("fields", {})

    def parse(self, text: str, opening: str) -> AssistantMessage:
        try:
            parsed = self._renderer.tokenizer.parse_response(text + self._turn_end, prefix=opening)
        except Exception as error:  # the template's parsers and patterns may raise anything
            return AssistantMessage("", text.strip(), (), f"The turn cannot be read: {one_line(error)}.")
        thought = next((str(parsed[name]).strip() for name in _THOUGHTS if parsed.get(name)), "")
        content = str(parsed.get("content") or "").strip()
        calls: list[ToolCall] = []
        try:
            for entry in parsed.get(_CALLS) or ():
                function = entry.get("function", entry) if isinstance(entry, dict) else entry
                calls.append(read_call(function, "arguments"))
        except CallError as error:
            return AssistantMessage(thought, content, (), str(error))
        return AssistantMessage(thought, content, tuple(calls))

    def write_call(self, call: ToolCall) -> str:
        texts = {
            name: value if isinstance(value, str) else write_json(value)
            for name, value in call.arguments.items()
        }
        for style in STYLES:
            try:
                written = written_call(self._renderer, style, ToolCall(call.name, texts))
            except (NoCallShown, TemplateFailure):
                continue
            _, _, behind_thought = written.rpartition(self.thought_tags[1])
            parts_of_calls = self.call_tokens()
            for match in self._renderer.control_pattern.finditer(behind_thought):
                if match[0] not in parts_of_calls:
                    return behind_thought[: match.start()].strip()
            return behind_thought.strip()
        raise UserError(f"{self._renderer.title} renders no call of {call.name}")

    def call_tokens(self) -> str:
        """Return the markup of calls without that which ends contents too: the end of the turn."""
        calls = _delimiters(self._call_field)
        return calls.replace(self._turn_end, "") if self._turn_end else calls


def _delimiters(field: dict[str, Any]) -> str:
    """Return the markup of a field of a response template, where patterns stand without their backslashes."""
    return "".join(str(field.get(key, "")).replace("\\", "") for key in _DELIMITERS)


def _literals(fields: Any) -> Iterator[str]:
    """Yield the texts that open and close the fields of a response template."""
    for field in fields:
        for key in ("open", "close"):
            texts = field.get(key, [])
            yield from [texts] if isinstance(texts, str) else texts
