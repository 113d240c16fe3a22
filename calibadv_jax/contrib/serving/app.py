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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from calibadv_jax.contrib.cli import ask
from calibadv_jax.contrib.pages.server import TYPES, guard_headers, is_this_machine
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.tags import Grammar, neutralise, printable
from calibadv_jax.core.trajectory import Document, Trajectory, Turn
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending
from calibadv_jax.rollout.runner import Rollouts

T = TypeVar("T")
Moment = tuple[Turn, bool]  # a sampled turn, and whether it has its observation
Progress = Moment | Trajectory  # the moments of a question, then the whole

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


class ApiError(HTTPException):
    """A refusal or failure, as clients of OpenAI read it."""

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status_code, self.headers)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str
    content: str | list[TextPart]


class ChatRequest(BaseModel):
    """A request; fields without a name here have no effect."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )  # of each turn
    # Only values that ask for one answer as plain text.
    n: Literal[1] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def question(self) -> str:
        content = next(message.content for message in self.messages if message.role == "user")
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        return "\n".join(parts).strip()

    @property
    def ignored(self) -> list[str]:
        """Messages and fields without effect: the policy reads the prompt that it was trained with."""
        messages = [f"{message.role} message" for message in self.messages if message.role != "user"]
        fields = (self.model_extra or {}).items()
        return messages + [printable(name) for name, value in fields if value is not None]


def parse(body: bytes, model: str) -> ChatRequest:
    """Return a request for the `model`; ApiError if it asks for more than one question and its answer."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(400, printable(f"{place}: {first['msg']}")) from error
    if request.model != model:
        raise ApiError(404, f"model: there is {model!r} only")
    roles = [message.role for message in request.messages]
    if roles.count("user") != 1 or not {*roles} <= {"user", "system", "developer"}:
        advice = "send one user message with the question, and no history"
        raise ApiError(400, f"messages: one question gives one trajectory; {advice}")
    if not printable(request.question):
        raise ApiError(400, "messages: the question is empty")
    return request


class ChatReply:
    """The reply to one request, whole or in chunks. Texts hold no protocol tags and no control characters."""

    def __init__(self, request: ChatRequest, grammar: Grammar):
        self._request, self._grammar = request, grammar
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._head = {"id": name, "created": created, "model": request.model}

    async def whole(self, progress: AsyncIterator[Progress]) -> dict[str, Any]:
        items = [item async for item in progress]
        trajectory = next(item for item in items if isinstance(item, Trajectory))
        thoughts = [_reasoning(self._part(*item)) for item in items if not isinstance(item, Trajectory)]
        message = {"role": "assistant", "reasoning_content": "".join(thoughts).strip()}
        message |= self._content(trajectory)
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(trajectory)}
        reply = self._head | {"object": "chat.completion", "choices": [choice], "usage": _usage(trajectory)}
        return reply | {"calibadv": self._sources(trajectory)}

    async def events(self, first: Progress, following: AsyncIterator[Progress]) -> AsyncIterator[str]:
        """Yield turns, then the answer, the end, and the usage if it was asked for."""
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
        yield _event(self._chunk(self._content(item)))
        yield _event(self._chunk({}, _reason(item), calibadv=self._sources(item)))
        if (self._request.stream_options or {}).get("include_usage"):
            yield _event(self._chunk({}) | {"choices": [], "usage": _usage(item)})
        yield "data: [DONE]\n\n"

    def _shown(self, text: str) -> str:
        return printable(neutralise(text, grammar=self._grammar))

    def _document(self, document: Document) -> dict[str, str]:
        return {name: self._shown(getattr(document, name)) for name in ("id", "title", "text")}

    def _part(self, turn: Turn, is_observed: bool) -> dict[str, Any]:
        """Return the fields that show a sampled turn, or its observation."""
        if is_observed:
            words = self._shown(ask.observed_words(turn))
            documents = list(map(self._document, turn.documents))
            return {"refused": turn.is_refused, "words": words, "documents": documents}
        part = {"kind": turn.kind, "thought": self._shown(turn.think)}
        if turn.is_action:
            part["query"] = self._shown(turn.query)
        elif turn.kind != "answer":
            part["text"] = self._shown(turn.text)
        return part

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

    def _content(self, trajectory: Trajectory) -> dict[str, Any]:
        if trajectory.answer is not None:
            return {"content": self._shown(trajectory.answer), "refusal": None}
        return {"content": "", "refusal": self._shown(ending(trajectory))}

    def _sources(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the documents that were read, each once, with the duration and `ignored`."""
        answer = [trajectory.answer or ""]
        read = {
            (document.id, document.text): document for turn in trajectory.turns for document in turn.documents
        }
        documents = [
            texts | {"holds_answer": holds_answer(f"{texts['title']} {texts['text']}", answer)}
            for texts in map(self._document, read.values())
        ]
        return {"documents": documents, "seconds": trajectory.seconds, "ignored": self._request.ignored}


def _reasoning(part: Mapping[str, Any]) -> str:
    """Return the part as text: paragraphs of the thought, the action and the beginnings of documents."""
    paragraphs = [part.get("thought", "")]
    if "query" in part or "text" in part:
        paragraphs.append(f"{part['kind']}: {part.get('query', part.get('text'))}")
    paragraphs.append(cut(part.get("words", ""), LONGEST))
    for number, document in enumerate(part.get("documents", ()), 1):
        paragraphs.append(cut(f"[{number}] {document['title']}: {document['text']}", SHOWN))
    return "".join(f"{paragraph}\n\n" for paragraph in paragraphs if paragraph)


def _reason(trajectory: Trajectory) -> str:
    return "length" if trajectory.turns[-1].stop_reason == "length" else "stop"


def _usage(trajectory: Trajectory) -> dict[str, int]:
    """Count each token of the trajectory once: what the policy read, and what it wrote."""
    written = int(trajectory.mask.sum())
    read = len(trajectory.prompt_ids) + len(trajectory.mask) - written
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


@dataclass
class Service:
    """Answers questions with `rollouts`, `slots` at a time; at most `queue` further ones wait."""

    rollouts: Rollouts
    model: str
    slots: int
    queue: int
    seconds: float  # for one question, without its waiting
    attempts: set[asyncio.Task[Trajectory]] = field(default_factory=set, init=False)  # that wait or run
    _free: asyncio.Semaphore = field(init=False)
    _begun: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Progress]:
        """Yield each turn and observation, then the finished trajectory.

        Raises ApiError if the question cannot be asked, too many wait, or it failed. Closed early, it leaves
        the question.
        """
        if len(self.attempts) >= self.slots + self.queue:
            message = f"all slots are in use, and {self.queue} questions wait; try again later"
            raise ApiError(429, message, LATER)
        moments: asyncio.Queue[Moment | None] = asyncio.Queue()  # None: there are no more
        self._begun += 1
        task = asyncio.create_task(self._write(request, f"serve{self._begun}", moments))
        self.attempts.add(task)
        task.add_done_callback(self.attempts.discard)
        task.add_done_callback(lambda _: moments.put_nowait(None))
        is_asked = False
        try:
            while (moment := await moments.get()) is not None:
                is_asked = True
                yield moment
            yield self._finished(task, is_asked)
        finally:
            task.cancel()

    async def _write(
        self, request: ChatRequest, session: str, moments: asyncio.Queue[Moment | None]
    ) -> Trajectory:
        default = self.rollouts.context.rollout
        rollout = replace(
            default,
            temperature=default.temperature if request.temperature is None else request.temperature,
            top_p=request.top_p or default.top_p,
            max_turn_length=min(request.max_tokens or default.max_turn_length, default.max_turn_length),
            time_limit=self.seconds,
        )
        async with self._free:
            return await ask.run_question(
                self.rollouts,
                "serve",
                request.question,
                lambda turn, is_observed: moments.put_nowait((turn, is_observed)),
                rollout,
                request.seed,
                session,
            )

    def _finished(self, task: asyncio.Task[Trajectory], is_asked: bool) -> Trajectory:
        if task.cancelled():
            raise ApiError(503, "the service is ending", LATER)
        error = task.exception()
        if isinstance(error, UserError):
            is_ours = is_asked or isinstance(error, EnvironmentFailure)  # else the question is too long
            raise ApiError(503 if is_ours else 400, redact(str(error)), LATER if is_ours else None)
        if error is not None:
            logging.getLogger("uvicorn.error").error("a question failed", exc_info=error)
            raise ApiError(500, f"{type(error).__name__} in the service; its log has the details")
        trajectory = task.result()
        if trajectory.error is None:
            return trajectory
        if trajectory.error.startswith("time: "):
            raise ApiError(504, f"not finished within {self.seconds:g} s (--time-limit)", NEVER)
        raise ApiError(503, trajectory.error, LATER)

    async def end(self) -> None:
        for task in self.attempts:
            task.cancel()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return the app behind `_refusal`."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        error = _refusal(scope["path"], Headers(scope=scope), token)
        await (error.response() if error else app)(scope, receive, send)

    return guard


def _refusal(path: str, headers: Headers, token: str) -> ApiError | None:
    """Return the error for other hosts, other origins, and requests without the token.

    Without a token, only names of this machine are taken as the host: another page may have made its own name
    point here. A page elsewhere may never ask: its origin differs from the host.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not token and not is_this_machine(host):
        return ApiError(403, "without a token only this machine is served: open http://localhost")
    if origin and origin.partition("://")[2] != host:
        return ApiError(403, "pages of other origins are not served")
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    is_token = hmac.compare_digest(sent.encode("latin-1").strip(), token.encode())
    if token and path.startswith("/v1/") and not (is_token and scheme.lower() == "bearer"):
        message = "send the header Authorization: Bearer <the service's token>"
        return ApiError(401, message, {"WWW-Authenticate": "Bearer"})
    return None


async def _reply_to_error(request: Request, error: Any) -> Response:
    if not isinstance(error, ApiError):  # of the router
        message = f"{request.method} {request.url.path}: {error.detail}; {ROUTES}"
        error = ApiError(error.status_code, message, error.headers)
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
                    raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", close)
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {CLIENT_SECONDS:g} s", close) from error
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


def make_app(service: Service) -> Starlette:
    contents = {path.name: path.read_bytes() for path in FILES}

    async def chat(http: Request) -> Response:
        request = parse(await _body(http), service.model)
        reply = ChatReply(request, service.rollouts.context.grammar)
        turns = service.answer(request)
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
        exception_handlers={HTTPException: _reply_to_error},
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
        guarded(make_app(service), token),
        http=Bounded,
        ws="none",
        lifespan="off",
        log_config=None,  # warnings go to standard error
        access_log=False,
        headers=list(guard_headers().items()),
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
