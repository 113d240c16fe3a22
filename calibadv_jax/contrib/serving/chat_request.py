"""Requests of OpenAI's chat completions and completions: their question, its context, and how to sample.

Every field is checked here, so that a refusal says in words what the agent can do. Null counts as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from calibadv_jax.core.tags import to_printable_line, well_formed_json

EARLIER_MESSAGES = 8  # messages before the question that the policy reads at most
EARLIER_LETTERS = 500  # letters of each of them
SETTING_ROLES = ("system", "developer")  # roles of messages without effect
TOOL_ROLES = ("tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
# Fields that limit the tokens of a turn; the first that is not null counts.
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


class ApiError(HTTPException):
    """A refusal or failure, as clients of OpenAI read it."""

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind}}

    def response(self) -> Response:
        """Return the reply."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


@dataclass(frozen=True)
class _Rule:
    """What a field may be, in code and in words."""

    allows: Callable[[Any], bool]
    words: str


_LENGTH = _Rule(lambda value: _is_whole(value) and value >= 1, "must be a whole number greater than 0")
_TOOLS = _Rule(_is_list, "must be a list")
RULES = {
    "stream": _Rule(lambda value: isinstance(value, bool), "must be true or false, a boolean"),
    "stream_options": _Rule(lambda value: isinstance(value, dict), "must be an object"),
    "temperature": _Rule(lambda value: _is_number(value) and 0 <= value <= 2, "must be a number from 0 to 2"),
    "top_p": _Rule(lambda value: _is_number(value) and 0 < value <= 1, "must be a number above 0, up to 1"),
    "seed": _Rule(
        lambda value: _is_whole(value) and -(2**63) <= value < 2**63, "must be a whole number of 64 bits"
    ),
    "max_completion_tokens": _LENGTH,
    "max_tokens": _LENGTH,
    "n": _Rule(lambda value: _is_number(value) and value == 1, "must be 1: one question gives one answer"),
    "best_of": _Rule(
        lambda value: _is_number(value) and value == 1, "must be 1: one question gives one answer"
    ),
    "tools": _TOOLS,
    "functions": _TOOLS,
    "include_tool_calls": _Rule(lambda value: isinstance(value, bool), "must be true or false, a boolean"),
    "response_format": _Rule(
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        "must be {'type': 'text'}: the agent answers in plain text",
    ),
}


@dataclass(frozen=True)
class ChatRequest:
    """A question with its settings.

    Attributes:
        model: name of the model.
        question: text of the question.
        earlier: messages before the question, oldest first: who wrote it ("User" or "Assistant"), and its
            text.
        stream: whether the reply is sent in parts.
        has_usage: whether a stream ends with the usage.
        temperature: None: that of the service.
        top_p: None: that of the service.
        seed: None: that of the service.
        max_tokens: largest number of tokens of each turn; None: that of the service.
        length_field: name of the field that `max_tokens` came from.
        ignored: messages and fields without effect.
        shows_calls: whether the reply has the agent's calls, as OpenAI's messages.
    """

    model: str
    question: str
    earlier: Sequence[tuple[str, str]] = ()
    stream: bool = False
    has_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    length_field: str = ""
    ignored: Sequence[str] = field(default_factory=list)
    shows_calls: bool = False

    def text(self, num_earlier: int) -> str:
        """Return what the policy reads as its question.

        Args:
            num_earlier: number of earlier messages to put before the question, the newest ones.
        """
        if not num_earlier:
            return self.question
        lines = [f"{writer}: {text}" for writer, text in self.earlier[-num_earlier:]]
        return "\n".join(["Conversation so far:", *lines, "", f"Question: {self.question}"])


def parse_chat(body: bytes, model: str, tools: Sequence[str] = ()) -> ChatRequest:
    """Return the request of a body of POST /v1/chat/completions.

    Args:
        body: JSON.
        model: name of the model that is served.
        tools: names of the agent's own tools.

    Raises:
        ApiError: the body is not valid, names another model, or asks for something else than an answer in
            text.
    """
    fields = _read_fields(body, model, tools)
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: must be a list of at least 1 message, the user's question")
    ignored: list[str] = []
    conversation: list[tuple[int, dict[str, Any]]] = []  # without messages that have no effect
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role in SETTING_ROLES:
            ignored.append(f"{role} message")
        elif role in ("user", "assistant", *TOOL_ROLES):
            conversation.append((number, message))
        else:
            raise ApiError(
                400,
                f"messages.{number}: must be an object with the role user, assistant, system or developer",
            )
    if not conversation:
        raise ApiError(400, "messages: there is no question; send one user message with it, at the end")
    *before, (number, last) = conversation
    if last["role"] in TOOL_ROLES:
        raise ApiError(
            400,
            f"messages.{number}: results of tools are not taken: the agent searches by itself; end with the"
            " user's question",
        )
    if last["role"] != "user":
        raise ApiError(400, f"messages.{number}: the last message must be the user's question")
    question = _question(last.get("content"), f"messages.{number}.content")
    earlier = []
    for _, message in before:
        text = _earlier_text(message)
        if text:
            earlier.append((message["role"].capitalize(), text))
        else:
            ignored.append(f"{message['role']} message")
    num_old = max(0, len(earlier) - EARLIER_MESSAGES)
    ignored += ["earlier message"] * num_old
    return _make_request(fields, question, earlier[num_old:], ignored)


def parse_completion(body: bytes, model: str, tools: Sequence[str] = ()) -> ChatRequest:
    """Return the request of a body of POST /v1/completions, whose prompt is the question.

    Args:
        body: JSON.
        model: name of the model that is served.
        tools: names of the agent's own tools.

    Raises:
        ApiError: as `parse_chat`.
    """
    fields = _read_fields(body, model, tools)
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise ApiError(
            400, "prompt: must be one question, a string; token ids and several prompts are not taken"
        )
    return _make_request(fields, _question(prompt, "prompt"), [], [])


def _read_fields(body: bytes, model: str, tools: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a body that are not null, after checking those with a rule, and the model."""
    try:
        body.decode()  # bytes that are no UTF-8 are refused, lone surrogates become U+FFFD
        fields = json.loads(well_formed_json(body), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "body: must be valid JSON") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "body: must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None}
    if "model" not in fields:
        raise ApiError(400, f"model: missing; it is {model!r}")
    if fields.pop("model") != model:
        raise ApiError(404, f"model: there is {model!r} only")
    for name, rule in RULES.items():
        try:
            is_allowed = name not in fields or rule.allows(fields[name])
        except OverflowError:  # a number beyond any float
            is_allowed = False
        if not is_allowed:
            raise ApiError(400, f"{name}: {rule.words}")
    for name in ("tools", "functions"):
        if fields.get(name):
            _check_tools(name, fields, tools)
        if fields.get(name) == []:
            del fields[name]
    return fields | {"model": model}


def _check_tools(name: str, fields: Mapping[str, Any], tools: Sequence[str]) -> None:
    """Refuse tools of a request that are not the agent's own, and a choice that is not left to the agent."""
    choice = fields.get("tool_choice", fields.get("function_call", "auto"))
    if choice == "none":
        return
    named = [_tool_name(tool) for tool in fields[name]]
    if not set(named) <= set(tools):
        raise ApiError(
            400,
            f"{name}: the agent uses its own tools ({', '.join(tools)}), and cannot call those of a request;"
            ' leave them out, or set tool_choice to "none"',
        )
    if choice != "auto":
        raise ApiError(
            400, 'tool_choice: the agent itself chooses its tools; leave it out, or set it to "auto"'
        )


def _tool_name(tool: Any) -> str:
    """Return the name of a tool in OpenAI's form, or in that of functions; "" if it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _make_request(
    fields: dict[str, Any], question: str, earlier: list[tuple[str, str]], ignored: list[str]
) -> ChatRequest:
    """Return the request; fields that have no effect are ignored."""
    max_tokens = None
    length_field = ""
    for name in LENGTH_FIELDS:
        if max_tokens is None and name in fields:
            max_tokens = int(fields[name])
            length_field = name
    used = {"model", "stream", "stream_options", "temperature", "top_p", "seed", "n", "best_of"}
    used |= {"response_format", "include_tool_calls", *LENGTH_FIELDS}
    ignored = [*ignored, *(to_printable_line(name) for name in fields if name not in used)]
    seed = fields.get("seed")
    return ChatRequest(
        model=fields["model"],
        question=question,
        earlier=earlier,
        stream=fields.get("stream", False),
        has_usage=bool(fields.get("stream_options", {}).get("include_usage")),
        temperature=fields.get("temperature"),
        top_p=fields.get("top_p"),
        seed=None if seed is None else int(seed),
        max_tokens=max_tokens,
        length_field=length_field,
        ignored=ignored,
        shows_calls=fields.get("include_tool_calls", False),
    )


def _question(content: Any, place: str) -> str:
    """Return the text of the question; raise ApiError for contents that are no text."""
    if content is None:
        raise ApiError(400, f"{place}: is null or missing; it must be a string, the question")
    texts = []
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        for number, part in enumerate(content):
            texts.append(_part_text(part, f"{place}.{number}"))
    else:
        raise ApiError(400, f"{place}: must be a string, or a list of parts with text")
    question = "\n".join(texts).strip()
    if not to_printable_line(question):
        raise ApiError(400, f"{place}: the question is empty")
    return question


def _part_text(part: Any, place: str) -> str:
    """Return the text of a part of a message; raise ApiError for other parts."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        name = to_printable_line(str(kind))[:40]
        raise ApiError(
            400,
            f"{place}: a part of type {name!r} is not read: the agent reads text alone; send a string, or"
            " parts of type 'text'",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ApiError(400, f"{place}.text: must be a string")
    return text


def _earlier_text(message: Mapping[str, Any]) -> str:
    """Return the text of an earlier message on one line, without its thoughts; empty if it has none."""
    if message["role"] in TOOL_ROLES:
        return ""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            part = part.get("text")
        if isinstance(part, str):
            texts.append(part)
    text = to_printable_line(_THOUGHT.sub("", " ".join(texts)))
    return text if len(text) <= EARLIER_LETTERS else text[: EARLIER_LETTERS - 1] + "…"
