"""Requests and replies of OpenAI's chat completions, for one question and its trajectory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from calibadv_jax.contrib.cli import ask
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import Grammar, to_printable_line
from calibadv_jax.core.trajectory import Document, Trajectory, Turn
from calibadv_jax.metrics.shown_steps import LONGEST_LINE, answer_line, truncate

Moment = tuple[Turn, bool]  # a sampled turn, and whether it has its observation
Progress = Moment | Trajectory  # the moments of a question, and at the end its trajectory

SHOWN = 200  # characters of a document within the reasoning


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


class TextPart(BaseModel):
    """Text as a part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a request."""

    role: str
    content: str | list[TextPart]


class ChatRequest(BaseModel):
    """A request; fields that are not listed here have no effect."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    # Largest number of tokens of each turn.
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    # Of these fields only the values are allowed that ask for one answer as plain text.
    n: Literal[1] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def question(self) -> str:
        """The text of the user's message."""
        content = next(message.content for message in self.messages if message.role == "user")
        if isinstance(content, str):
            return content.strip()
        return "\n".join(part.text for part in content).strip()

    @property
    def ignored(self) -> list[str]:
        """Messages and fields without effect: the policy reads the prompt that it was trained with."""
        ignored = [f"{message.role} message" for message in self.messages if message.role != "user"]
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                ignored.append(to_printable_line(name))
        return ignored


def parse(body: bytes, model: str) -> ChatRequest:
    """Return the request of a body.

    Args:
        body: JSON.
        model: name of the model that is served.

    Raises:
        ApiError: the body is not valid, names another model, or asks for more than one question and its
            answer.
    """
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        raise ApiError(400, to_printable_line(f"{place}: {first['msg']}")) from error
    if request.model != model:
        raise ApiError(404, f"model: there is {model!r} only")
    roles = [message.role for message in request.messages]
    if roles.count("user") != 1 or not set(roles) <= {"user", "system", "developer"}:
        raise ApiError(
            400,
            "messages: one question gives one trajectory; send one user message with the question, and no"
            " history",
        )
    if not to_printable_line(request.question):
        raise ApiError(400, "messages: the question is empty")
    return request


class ChatReply:
    """The reply to one request, whole or in chunks. Texts hold no protocol tags and no control characters."""

    def __init__(self, request: ChatRequest, grammar: Grammar):
        self._request = request
        self._grammar = grammar
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }

    async def whole(self, progress: AsyncIterator[Progress]) -> dict[str, Any]:
        """Return the reply when the trajectory is finished."""
        reasoning = ""
        async for item in progress:
            if isinstance(item, Trajectory):
                trajectory = item
            else:
                reasoning += _reasoning(self._part(*item))
        message = {"role": "assistant", "reasoning_content": reasoning.strip()}
        message.update(self._content(trajectory))
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _finish_reason(trajectory),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(trajectory),
            "calibadv": self._sources(trajectory),
        }

    async def events(self, first: Progress, following: AsyncIterator[Progress]) -> AsyncIterator[str]:
        """Yield turns, then the answer, the end, and the usage if it was asked for, as server-sent events."""
        yield _event(self._chunk({"role": "assistant", "content": ""}))
        item = first
        try:
            while not isinstance(item, Trajectory):
                part = self._part(*item)
                yield _event(self._chunk({"reasoning_content": _reasoning(part)}, calibadv={"turn": part}))
                item = await anext(following)
        except ApiError as error:
            yield _event(error.body)
            return
        trajectory = item
        yield _event(self._chunk(self._content(trajectory)))
        yield _event(self._chunk({}, _finish_reason(trajectory), calibadv=self._sources(trajectory)))
        if (self._request.stream_options or {}).get("include_usage"):
            usage = self._chunk({})
            usage["choices"] = []
            usage["usage"] = _usage(trajectory)
            yield _event(usage)
        yield "data: [DONE]\n\n"

    def _shown(self, text: str) -> str:
        return to_printable_line(Neutraliser(self._grammar).neutralise(text))

    def _document(self, document: Document) -> dict[str, str]:
        return {
            "id": self._shown(document.id),
            "title": self._shown(document.title),
            "text": self._shown(document.text),
        }

    def _part(self, turn: Turn, is_observed: bool) -> dict[str, Any]:
        """Return the fields that show a sampled turn, or its observation."""
        if is_observed:
            return {
                "refused": turn.is_refused,
                "words": self._shown(ask.observed_words(turn)),
                "documents": [self._document(document) for document in turn.documents],
            }
        part = {"kind": turn.kind, "thought": self._shown(turn.think)}
        if turn.is_action:
            part["query"] = self._shown(turn.query)
        elif turn.kind != "answer":
            part["text"] = self._shown(turn.text)
        return part

    def _chunk(
        self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

    def _content(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the answer; or, where there is none, why."""
        if trajectory.answer is not None:
            return {"content": self._shown(trajectory.answer), "refusal": None}
        return {"content": "", "refusal": self._shown(answer_line(trajectory))}

    def _sources(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the documents that were read, each once, with the duration and `ignored`."""
        answers = [trajectory.answer or ""]
        read: dict[tuple[str, str], Document] = {}
        for turn in trajectory.turns:
            for document in turn.documents:
                read[document.id, document.text] = document
        documents: list[dict[str, Any]] = []
        for document in read.values():
            shown = self._document(document)
            text = f"{shown['title']} {shown['text']}"
            documents.append({**shown, "holds_answer": holds_answer(text, answers)})
        return {"documents": documents, "seconds": trajectory.seconds, "ignored": self._request.ignored}


def _reasoning(part: Mapping[str, Any]) -> str:
    """Return the part as text: paragraphs of the thought, the action and the beginnings of documents."""
    paragraphs = [part.get("thought", "")]
    if "query" in part:
        paragraphs.append(f"{part['kind']}: {part['query']}")
    elif "text" in part:
        paragraphs.append(f"{part['kind']}: {part['text']}")
    paragraphs.append(truncate(part.get("words", ""), LONGEST_LINE))
    for number, document in enumerate(part.get("documents", ()), 1):
        paragraphs.append(truncate(f"[{number}] {document['title']}: {document['text']}", SHOWN))
    return "".join(f"{paragraph}\n\n" for paragraph in paragraphs if paragraph)


def _finish_reason(trajectory: Trajectory) -> str:
    return "length" if trajectory.turns[-1].stop_reason == "length" else "stop"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Count each token of the trajectory once: what the policy read, and what it wrote."""
    written = int(trajectory.mask.sum())
    read = len(trajectory.prompt_ids) + len(trajectory.mask) - written
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _event(value: Mapping[str, Any]) -> str:
    """Return a value as a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"
