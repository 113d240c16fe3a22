"""Replies of OpenAI's chat completions and completions, for one question and its trajectory."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from calibadv_jax.contrib.cli import ask
from calibadv_jax.contrib.serving.chat_request import ApiError, ChatRequest
from calibadv_jax.contrib.serving.messages import messages_of
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.trajectory import Document, Trajectory, Turn
from calibadv_jax.metrics.shown_steps import LONGEST_LINE, answer_line, truncate
from calibadv_jax.rollout.protocol import TurnProtocol

Moment = tuple[Turn, bool]  # a sampled turn, and whether it has its observation
Progress = Moment | Trajectory  # the moments of a question, and at the end its trajectory

SHOWN = 200  # characters of a document within the reasoning


class ChatReply:
    """The reply to one request, whole or in chunks. Texts hold no protocol tags and no control characters.

    Attributes:
        id_prefix: how ids of replies begin.
        kind: the field "object" of a whole reply.
        chunk_kind: the field "object" of a chunk.
    """

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, protocol: TurnProtocol):
        """Prepare the reply.

        Args:
            request: The request.
            protocol: The protocol of the agent's turns.
        """
        self._request = request
        self._protocol = protocol
        own = protocol.neutraliser
        self._neutraliser = Neutraliser(own.grammar, markers=own.markers)
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
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
        return {
            **self._head,
            "object": self.kind,
            "choices": [self._choice(trajectory, reasoning.strip())],
            "usage": _usage(trajectory),
            "calibadv": self._sources(trajectory),
        }

    def _choice(self, trajectory: Trajectory, reasoning: str) -> dict[str, Any]:
        """Return the only choice of a whole reply."""
        message = {"role": "assistant", "reasoning_content": reasoning}
        message.update(self._content(trajectory))
        return {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _finish_reason(trajectory),
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
        if self._request.has_usage:
            usage = self._chunk({})
            usage["choices"] = []
            usage["usage"] = _usage(trajectory)
            yield _event(usage)
        yield "data: [DONE]\n\n"

    def _shown(self, text: str) -> str:
        return to_printable_line(self._neutraliser.neutralise(text))

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
                "words": self._shown(ask.observed_words(turn, self._protocol)),
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
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **more}

    def _content(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the answer; or, where there is none, why."""
        if trajectory.answer is not None:
            return {"content": self._shown(trajectory.answer), "refusal": None}
        last = trajectory.turns[-1]
        limit = self._request.max_tokens
        reason = answer_line(trajectory)
        if last.stop_reason == "length" and limit is not None and len(last.token_ids) >= limit:
            reason = (
                f"no answer: its last turn was cut at {self._request.length_field}={limit} of the request:"
                " raise it, or leave it out"
            )
        return {"content": "", "refusal": self._shown(reason)}

    def _sources(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the documents that were read, each once, with the question, the duration and `ignored`."""
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
        return {
            "documents": documents,
            "question": self._shown(trajectory.question.text),
            "seconds": trajectory.seconds,
            "ignored": list(self._request.ignored),
            **self._messages(trajectory),
        }

    def _messages(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the trajectory as OpenAI's messages, if the request asks for its calls."""
        if not self._request.shows_calls:
            return {}
        return {"messages": messages_of(trajectory, self._protocol, self._shown)}


class CompletionReply(ChatReply):
    """The reply to a request of POST /v1/completions, whose answer is a choice's text."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def _choice(self, trajectory: Trajectory, reasoning: str) -> dict[str, Any]:
        return self._text_choice(self._content(trajectory), _finish_reason(trajectory))

    def _chunk(
        self, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = self._text_choice(delta, finish_reason)
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **more}

    def _text_choice(self, message: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
        """Return a choice with the text of a message; `refusal` says why an answer is missing."""
        choice = {"index": 0, "text": message.get("content", ""), "logprobs": None}
        if message.get("refusal"):
            choice["refusal"] = message["refusal"]
        return choice | {"finish_reason": finish_reason}


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
