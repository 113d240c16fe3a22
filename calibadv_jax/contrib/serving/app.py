"""The HTTP service of an agent: OpenAI's chat completions for one question and its trajectory.

It runs on the event loop of the rollouts: a client that leaves cancels its trajectory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import uvicorn
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from calibadv_jax.contrib import asking
from calibadv_jax.contrib.pages.site import HEADERS, TYPES, is_this_machine
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.tags import Grammar, neutralise, printable
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Trajectory, Turn
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending
from calibadv_jax.rollout.runner import Rollouts

T = TypeVar("T")
Chunk = dict[str, Any]
Progress = Chunk | Trajectory  # turns, then the whole

MAX_BODY = 2**18  # bytes of a request
MAX_HEAD = 2**16
MAX_CONNECTIONS = 256
CLIENT_SECONDS = 30.0  # for a client to send a request's head, and again its body
ENDING_SECONDS = 3  # for replies to be sent when the service ends
LATER = {"Retry-After": "2"}
NEVER = {"X-Should-Retry": "false"}  # else OpenAI's clients repeat a request that fails again
ROUTES = "there are GET /, GET /health, GET /v1/models and POST /v1/chat/completions"
FOLDER = Path(__file__).parent
FILES = [FOLDER / "static" / name for name in ("page.html", "page.css", "page.js")]
FILES += [FOLDER.parent / "pages/static" / name for name in ("style.css", "icon.svg")]

SHOWN = 200  # characters of a document within the reasoning
SINGLE = "one question gives one trajectory"
LIMITS = f"{SINGLE} with the agent's own actions, and an answer as plain text"
# Values of further fields that ask for nothing else; empty ones do not either.
NEUTRAL = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
NEUTRAL |= {"tool_choice": "none", "function_call": "none"}
BOOKKEEPING = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")


class ApiError(HTTPException):
    """A refusal or failure, as clients of OpenAI read it."""

    def __init__(self, status: int, message: str, param: str = "", code: str = "", headers: Any = None):
        super().__init__(status, message, headers)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": error}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status_code, self.headers)


def _internal(error: BaseException) -> ApiError:
    return ApiError(500, f"{type(error).__name__} in the service; its log has the details")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


def _text(content: Any) -> Any:
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

    @model_validator(mode="before")
    @classmethod
    def _with_effect(cls, fields: Any) -> Any:
        """Leave out fields that ask for nothing; the others that are no fields of this class are refused."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if name in cls.model_fields or (name not in BOOKKEEPING and value and value != NEUTRAL.get(name))
        }

    @property
    def question(self) -> str:
        return next(message.content for message in self.messages if message.role == "user").strip()

    @property
    def ignored(self) -> list[str]:
        """Messages without effect: the policy reads the prompt that it was trained with."""
        return [f"{message.role} message" for message in self.messages if message.role != "user"]

    def changes(self, temperature: float, max_turn_length: int) -> dict[str, Any]:
        """Return the changes of the RolloutConfig, given its defaults."""
        limits = self.max_tokens or max_turn_length, self.max_completion_tokens or max_turn_length
        changed: dict[str, Any] = {"max_turn_length": min(*limits, max_turn_length)}
        changed["temperature"] = temperature if self.temperature is None else self.temperature
        return changed if self.top_p is None else changed | {"top_p": self.top_p}


def parse(body: bytes, model: str) -> ChatRequest:
    """Return a request for the `model`; ApiError if it asks for more than one question and its answer."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        is_other = first["type"] == "extra_forbidden"
        message = f"{LIMITS}; leave it out" if is_other else first["msg"].removeprefix("Value error, ")
        code = "unsupported_value" if is_other else ""
        raise ApiError(400, printable(f"{place}: {message}"), place, code) from error
    if request.model != model:
        raise ApiError(404, f"model: there is {model!r} only", "model", "model_not_found")
    roles = [message.role for message in request.messages]
    if roles.count("user") != 1 or not {*roles} <= {"user", "system", "developer"}:
        message = f"messages: {SINGLE}; send one user message with the question, and no history"
        raise ApiError(400, message, "messages")
    if not printable(request.question):
        raise ApiError(400, "messages: the question is empty", "messages")
    return request


class ChatReply:
    """The reply to one request, whole or in chunks. Texts hold no protocol tags and no control characters."""

    def __init__(self, request: ChatRequest, grammar: Grammar):
        self._request, self._grammar = request, grammar
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "created": created, "model": request.model}
        self._turns: list[dict[str, Any]] = []
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}

    def _shown(self, text: str) -> str:
        return printable(neutralise(text, grammar=self._grammar))

    def turn(self, turn: Turn, is_observed: bool) -> Chunk:
        """Note a turn, or its observation, and return the chunk that shows it."""
        about: dict[str, Any]
        if is_observed:
            about = {"turn": len(self._turns), "refused": turn.is_refused}
            about["words"] = self._shown(asking.observed_words(turn))
            about["documents"] = [self._read(document) for document in turn.documents]
            self._turns[-1] = self._turns[-1] | about  # a copy: the chunk that is queued must not change
        else:
            about = {"turn": len(self._turns) + 1, "kind": turn.kind, "thought": self._shown(turn.think)}
            if turn.kind not in NO_ACTIONS:
                about["query"] = self._shown(turn.query)
            elif turn.kind != "answer":
                about["text"] = self._shown(turn.text)
            self._turns.append(about)
        return self._chunk(_reasoning(f"{_paragraphs([about])}\n\n"), calibadv={"turn": about})

    def _read(self, document: Document) -> dict[str, Any]:
        texts = {name: self._shown(getattr(document, name)) for name in ("id", "title", "text")}
        return self._documents.setdefault((document.id, document.text), texts)

    async def whole(self, progress: AsyncIterator[Progress]) -> dict[str, Any]:
        trajectory = [item async for item in progress if isinstance(item, Trajectory)][0]
        message = {"role": "assistant"} | self._content(trajectory) | _reasoning(_paragraphs(self._turns))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(trajectory)}
        reply = self._head | {"object": "chat.completion", "choices": [choice], "usage": _usage(trajectory)}
        return reply | {"calibadv": self._own(trajectory) | {"turns": self._turns}}

    async def events(self, first: Progress, following: AsyncIterator[Progress]) -> AsyncIterator[str]:
        """Yield turns, then the answer, the end, and the usage if it was asked for."""
        yield _event(self._chunk({"role": "assistant", "content": ""}))
        item = first
        try:
            while not isinstance(item, Trajectory):
                yield _event(item)
                item = await anext(following)
        except ApiError as error:
            yield _event(error.body)
            return
        yield _event(self._chunk(self._content(item)))
        yield _event(self._chunk({}, _reason(item), calibadv=self._own(item)))
        if (self._request.stream_options or {}).get("include_usage"):
            yield _event(self._chunk({}) | {"choices": [], "usage": _usage(item)})
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> Chunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

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


def _paragraphs(turns: Iterable[Mapping[str, Any]]) -> str:
    paragraphs = []
    for about in turns:
        paragraphs.append(about.get("thought"))
        if "query" in about or "text" in about:
            paragraphs.append(f"{about['kind']}: {about.get('query', about.get('text'))}")
        paragraphs.append(cut(about.get("words", ""), LONGEST))
        for number, document in enumerate(about.get("documents", ()), 1):
            paragraphs.append(cut(f"[{number}] {document['title']}: {document['text']}", SHOWN))
    return "\n\n".join(filter(None, paragraphs))


def _reason(trajectory: Trajectory) -> str:
    return "length" if trajectory.turns[-1].stop_reason == "length" else "stop"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Count each token of the trajectory once: what the policy read, and what it wrote."""
    written = int(trajectory.mask.sum())
    read = len(trajectory.prompt_ids) + len(trajectory.mask) - written
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@dataclass
class Service:
    """Answers questions with `rollouts`, `slots` at a time; at most `queue` further ones wait.

    A question may take `seconds`, without its waiting; `temperature`: of a request without it.
    """

    rollouts: Rollouts
    model: str
    slots: int
    queue: int
    seconds: float
    temperature: float
    attempts: set[asyncio.Task[Trajectory]] = field(default_factory=set, init=False)  # that wait or run

    def __post_init__(self) -> None:
        self._free, self._begun, self._is_ending = asyncio.Semaphore(self.slots), 0, False

    async def answer(self, request: ChatRequest, reply: ChatReply) -> AsyncGenerator[Progress]:
        """Yield the chunk of each turn and observation, then the finished trajectory.

        Raises ApiError if the question cannot be asked, too many wait, or it failed. Closed early, it leaves
        the question.
        """
        if self._is_ending:
            raise ApiError(503, "the service is ending", headers=LATER)
        if len(self.attempts) >= self.slots + self.queue:
            message = f"all slots are in use, and {self.queue} questions wait; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=LATER)
        try:
            asking.check_question(self.rollouts, request.question)
        except UserError as error:
            raise ApiError(400, redact(str(error)), "messages") from error
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()  # None: there are no more
        self._begun += 1

        def watch(turn: Turn, is_observed: bool) -> None:
            chunks.put_nowait(reply.turn(turn, is_observed))

        async def write(session: str) -> Trajectory:
            changes = request.changes(self.temperature, self.rollouts.context.rollout.max_turn_length)
            async with self._free:
                question = self.rollouts, "serve", request.question, watch, request.seed, session
                return await asking.answer(*question, time_limit=self.seconds, **changes)

        task = asyncio.create_task(write(f"serve{self._begun}"))
        self.attempts.add(task)
        task.add_done_callback(self.attempts.discard)
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            yield self._finished(task)
        finally:
            task.cancel()

    def _finished(self, task: asyncio.Task[Trajectory]) -> Trajectory:
        if task.cancelled():
            raise ApiError(503, "the service is ending", headers=LATER)
        error = task.exception()
        if isinstance(error, UserError):
            raise ApiError(503, redact(str(error)), headers=LATER)
        if error is not None:
            logging.getLogger("uvicorn.error").error("a question failed", exc_info=error)
            raise _internal(error)
        trajectory = task.result()
        if trajectory.error is None:
            return trajectory
        if trajectory.error.startswith("time: "):
            raise ApiError(504, f"not finished within {self.seconds:g} s (--time-limit)", headers=NEVER)
        raise ApiError(503, trajectory.error, headers=LATER)

    async def end(self) -> None:
        self._is_ending = True
        for task in self.attempts:
            task.cancel()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


class Guard:
    """ASGI middleware: refuses other hosts, other origins, and requests without the token; adds headers.

    Without a token, only names of this machine are taken as the host: another page may have made its own name
    point here. A page elsewhere may never ask: its origin differs from the host.
    """

    def __init__(self, app: Any, token: str):
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        reply = self.app
        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            reply = error.response()
        await reply(scope, receive, send_with_headers)

    def _check(self, path: str, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.token and not is_this_machine(host):
            raise ApiError(403, "without a token only this machine is served: open http://localhost")
        if origin and origin.partition("://")[2] != host:
            raise ApiError(403, "pages of other origins are not served")
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        is_token = hmac.compare_digest(sent.strip().encode("latin-1"), self.token)
        if self.token and path.startswith("/v1/") and not (is_token and scheme.lower() == "bearer"):
            message = "send the header Authorization: Bearer <the service's token>"
            raise ApiError(401, message, "", "invalid_api_key", {"WWW-Authenticate": "Bearer"})


async def _reply_to_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        message = f"{request.method} {request.url.path}: {error.detail}; {ROUTES}"
        error = ApiError(error.status_code, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = _internal(error)
    return error.response()


async def _body(request: Request) -> bytes:
    """Return a JSON body; raise ApiError if it is too large, too slow, or what a page elsewhere can send."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    body, close = bytearray(), {"Connection": "close"}
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", headers=close)
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {CLIENT_SECONDS:g} s", headers=close) from error
    return bytes(body)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work, or cancel it and raise ApiError if the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def make_app(service: Service, token: str) -> Starlette:
    """Return the routes; with a `token`, those below /v1/ need it as bearer token."""
    contents = {path.name: path.read_bytes() for path in FILES}

    async def chat(http: Request) -> Response:
        request = parse(await _body(http), service.model)
        reply = ChatReply(request, service.rollouts.context.grammar)
        turns = service.answer(request, reply)
        if not request.stream:
            return JSONResponse(await _while_connected(http, reply.whole(turns)))
        first = await _while_connected(http, anext(turns))  # fails before a turn: the status can still say so
        end = BackgroundTask(turns.aclose)  # a client may have left in the middle
        return StreamingResponse(reply.events(first, turns), media_type="text/event-stream", background=end)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ready", "model": service.model, "questions": len(service.attempts)})

    async def models(_: Request) -> Response:
        entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "calibadv"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def show(http: Request) -> Response:
        name = http.url.path.removeprefix("/") or "page.html"
        return Response(contents[name], media_type=TYPES[name.rpartition(".")[2]])

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            *(Route("/" + name.removeprefix("page.html"), show) for name in contents),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers=dict.fromkeys((HTTPException, Exception), _reply_to_error),
    )


class Bounded(H11Protocol):
    """uvicorn's HTTP protocol, with a limit on the time of a request's head."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._deadline.cancel()
        elif self._deadline.cancelled():  # the first part of the next request
            self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


@contextmanager
def serving(service: Service, listener: socket.socket, token: str) -> Iterator[Future[None]]:
    """Serve within the block; the future ends when the server does."""
    config = uvicorn.Config(
        make_app(service, token),
        http=Bounded,
        ws="none",
        lifespan="off",
        log_config=None,  # warnings go to standard error
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=ENDING_SECONDS,
    )
    server = uvicorn.Server(config)
    ended = service.rollouts.submit(server.serve(sockets=[listener]))
    while not (server.started or ended.done()):
        time.sleep(0.01)
    try:
        yield ended
    finally:
        server.should_exit = True
        service.rollouts.run(service.end())
        ended.result()
