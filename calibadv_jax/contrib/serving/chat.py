"""OpenAI's chat completions for one question and its trajectory: requests, replies, chunks and errors."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from calibadv_jax.contrib.asking import observed_words
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.tags import Grammar, neutralise, printable
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Trajectory, Turn
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending

SHOWN = 200  # characters of a document within the reasoning
SINGLE = "one question gives one trajectory"
OWN_ACTIONS = "the agent has its own actions, from its config"
UNSUPPORTED = {  # field -> why; an empty value, or that of NEUTRAL, asks for nothing
    "n": SINGLE,
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), OWN_ACTIONS),
    **dict.fromkeys(("response_format", "modalities", "audio"), "an answer is plain text"),
    **dict.fromkeys(("logprobs", "top_logprobs", "store"), "not offered"),
    **dict.fromkeys(("stop", "logit_bias", "presence_penalty", "frequency_penalty"), "not supported"),
}
NEUTRAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]} | dict.fromkeys(
    ("tool_choice", "function_call"), "none"
)
BOOKKEEPING = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")


class ApiError(Exception):
    """A refusal or failure, as clients of OpenAI read it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _text(content: Any) -> Any:
    """Join the texts of a message's parts."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "\n".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise ValueError("only text can be asked")
    return content


class Message(_Strict):
    role: str
    content: Annotated[str, BeforeValidator(_text)]
    name: str | None = None


class ChatRequest(_Strict):
    """The fields of a request that have an effect."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # of each turn
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def question(self) -> str:
        return next(message.content for message in self.messages if message.role == "user").strip()

    @property
    def ignored(self) -> list[str]:
        """Messages without effect: the policy reads the prompt that it was trained with."""
        return [f"{message.role} message" for message in self.messages if message.role != "user"]

    def changes(self, temperature: float, max_turn_length: int) -> dict[str, Any]:
        """Return the changes of the RolloutConfig, given its defaults."""
        most = min(self.max_tokens or max_turn_length, self.max_completion_tokens or max_turn_length)
        changed: dict[str, Any] = {"max_turn_length": min(most, max_turn_length)}
        changed["temperature"] = temperature if self.temperature is None else self.temperature
        return changed if self.top_p is None else changed | {"top_p": self.top_p}


def parse(body: bytes, model: str) -> ChatRequest:
    """Return a request for the `model`; ApiError if it asks for more than one question and its answer."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object with model and messages")
    for name in (*UNSUPPORTED, *BOOKKEEPING):
        value = fields.pop(name, None)
        if value and name in UNSUPPORTED and value != NEUTRAL.get(name):
            raise ApiError(400, f"{name}: {UNSUPPORTED[name]}; leave it out", name, "unsupported_value")
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        message = "is not known; leave it out" if first["type"] == "extra_forbidden" else message
        raise ApiError(400, printable(f"{place}: {message}"), place) from error
    if request.model != model:
        raise ApiError(404, f"model: there is {model!r} only", "model", "model_not_found")
    roles = [message.role for message in request.messages]
    if unknown := [role for role in roles if role not in ("user", "system", "developer")]:
        role = printable(unknown[0])
        raise ApiError(400, f"messages: no history: {SINGLE}; leave out the {role} message", "messages")
    if roles.count("user") != 1:
        raise ApiError(400, f"messages: {SINGLE}; send one user message with the question", "messages")
    if not printable(request.question):
        raise ApiError(400, "messages: the question is empty", "messages")
    return request


class Reply:
    """The reply to one request, whole or in chunks. Texts hold no protocol tags and no control characters."""

    def __init__(self, request: ChatRequest, grammar: Grammar):
        self._request, self._grammar = request, grammar
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "created": created, "model": request.model}
        self._turns: list[dict[str, Any]] = []
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}

    def _shown(self, text: str) -> str:
        return printable(neutralise(text, grammar=self._grammar))

    def turn(self, turn: Turn, is_observed: bool) -> dict[str, Any]:
        """Note a turn, or its observation, and return the chunk that shows it."""
        about: dict[str, Any]
        if is_observed:
            about = {"turn": len(self._turns), "refused": turn.is_refused}
            about["words"] = self._shown(observed_words(turn))
            about["documents"] = [self._read(document) for document in turn.documents]
            self._turns[-1] = self._turns[-1] | about  # a copy: the chunk that is queued must not change
        else:
            about = {"turn": len(self._turns) + 1, "kind": turn.kind, "thought": self._shown(turn.think)}
            if turn.kind not in NO_ACTIONS:
                about["query"] = self._shown(turn.query)
            elif turn.kind != "answer":
                about["text"] = self._shown(turn.text)
            self._turns.append(about)
        return self.chunk(_reasoning("\n\n".join(_lines(about)) + "\n\n"), calibadv={"turn": about})

    def _read(self, document: Document) -> dict[str, Any]:
        texts = {name: self._shown(getattr(document, name)) for name in ("id", "title", "text")}
        return self._documents.setdefault((document.id, document.text), texts)

    def whole(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the reply that is not streamed."""
        message = {"role": "assistant", **self._content(trajectory)}
        message |= _reasoning("\n\n".join(line for about in self._turns for line in _lines(about)))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(trajectory)}
        own = {"calibadv": self._own(trajectory) | {"turns": self._turns}, "usage": _usage(trajectory)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **own}

    def chunk(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

    def last_chunks(self, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        """Yield the answer, the end, and the usage if it was asked for."""
        yield self.chunk(self._content(trajectory))
        yield self.chunk({}, _reason(trajectory), calibadv=self._own(trajectory))
        if (self._request.stream_options or {}).get("include_usage"):
            yield self.chunk({}) | {"choices": [], "usage": _usage(trajectory)}

    def _content(self, trajectory: Trajectory) -> dict[str, Any]:
        if trajectory.answer is not None:
            return {"content": self._shown(trajectory.answer), "refusal": None}
        return {"content": "", "refusal": self._shown(ending(trajectory))}

    def _own(self, trajectory: Trajectory) -> dict[str, Any]:
        answer = [trajectory.answer or ""]
        documents = [
            texts | {"holds_answer": holds_answer(f"{texts['title']} {texts['text']}", answer)}
            for texts in self._documents.values()
        ]
        return {"documents": documents, "seconds": trajectory.seconds, "ignored": self._request.ignored}


def _reasoning(text: str) -> dict[str, str]:
    """Return both names that clients know for thoughts: that of vLLM and OpenRouter, and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


def _lines(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paragraphs that tell a turn, its observation, or both."""
    if about.get("thought"):
        yield about["thought"]
    if "query" in about or "text" in about:
        yield f"{about['kind']}: {about.get('query', about.get('text'))}"
    if about.get("words"):
        yield cut(about["words"], LONGEST)
    for number, document in enumerate(about.get("documents", ()), 1):
        yield cut(f"[{number}] {document['title']}: {document['text']}", SHOWN)


def _reason(trajectory: Trajectory) -> str:
    return "length" if trajectory.turns[-1].stop_reason == "length" else "stop"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Count each token of the trajectory once: what the policy read, and what it wrote."""
    written = int(trajectory.mask.sum())
    read = len(trajectory.prompt_ids) + len(trajectory.mask) - written
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
