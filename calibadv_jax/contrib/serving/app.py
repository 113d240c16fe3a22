"""The HTTP service of an agent: routes, access, limits, and questions under way.

It runs on the event loop of the rollouts: a client that leaves cancels its trajectory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import resources
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from calibadv_jax.contrib import asking
from calibadv_jax.contrib.pages.site import HEADERS, TYPES, is_this_machine
from calibadv_jax.contrib.serving.chat import ApiError, ChatRequest, Reply, parse
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.trajectory import Trajectory, Turn
from calibadv_jax.rollout.runner import Rollouts

T = TypeVar("T")

MAX_BODY = 2**18  # bytes of a request
MAX_HEAD = 2**16
MAX_CONNECTIONS = 256
CLIENT_SECONDS = 30.0  # for a client to send a request's head, and again its body
ENDING_SECONDS = 3  # for replies to be sent when the service ends
LATER = {"Retry-After": "2"}
NEVER = {"X-Should-Retry": "false"}  # else OpenAI's clients repeat a request that fails again
ROUTES = "there are GET /, GET /health, GET /v1/models and POST /v1/chat/completions"
STATIC = {"serving": ("page.html", "page.css", "page.js"), "pages": ("style.css", "icon.svg")}


class Service:
    """Answers questions with `rollouts`, `slots` at a time; at most `queue` further ones wait.

    A question may take `seconds`, without its waiting; `temperature`: of a request without it.
    """

    def __init__(
        self, rollouts: Rollouts, model: str, slots: int, queue: int, seconds: float, temperature: float
    ):
        self.rollouts, self.model, self.queue = rollouts, model, queue
        self.seconds, self.temperature = seconds, temperature
        self.free, self._most = asyncio.Semaphore(slots), slots + queue
        self.attempts: set[Attempt] = set()  # that wait or run
        self._begun, self._is_ending = 0, False

    def begin(self, request: ChatRequest) -> Attempt:
        """Start a question; raise ApiError if it cannot be asked, or too many wait."""
        if self._is_ending:
            raise ApiError(503, "the service is ending", headers=LATER)
        if len(self.attempts) >= self._most:
            message = f"all slots are in use, and {self.queue} questions wait; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=LATER)
        try:
            asking.check_question(self.rollouts, request.question)
        except UserError as error:
            raise ApiError(400, redact(str(error)), "messages") from error
        self._begun += 1
        return Attempt(self, request, f"serve{self._begun}")

    async def end(self) -> None:
        """Cancel all questions; their clients get 503."""
        self._is_ending = True
        for attempt in list(self.attempts):
            await attempt.cancel(ApiError(503, "the service is ending", headers=LATER))


class Attempt:
    """A question under way."""

    def __init__(self, service: Service, request: ChatRequest, session: str):
        self.reply = Reply(request, service.rollouts.context.grammar)
        self.chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: there are no more
        self._service, self._failure = service, ApiError(499, "the client has left")
        self._task = asyncio.create_task(self._write(request, session))
        service.attempts.add(self)
        self._task.add_done_callback(self._note_end)

    async def _write(self, request: ChatRequest, session: str) -> Trajectory:
        service, rollouts = self._service, self._service.rollouts
        changes = request.changes(service.temperature, rollouts.context.rollout.max_turn_length)
        changes["time_limit"] = service.seconds

        def watch(turn: Turn, is_observed: bool) -> None:
            self.chunks.put_nowait(self.reply.turn(turn, is_observed))

        async with service.free:
            question = rollouts, "serve", request.question, watch, request.seed, session
            return await asking.answer(*question, **changes)

    def _note_end(self, _: asyncio.Task[Trajectory]) -> None:
        self._service.attempts.discard(self)
        self.chunks.put_nowait(None)

    async def cancel(self, failure: ApiError | None = None) -> None:
        self._failure = failure or self._failure
        self._task.cancel()

    async def trajectory(self) -> Trajectory:
        """Wait for the end; raise ApiError if there is no finished trajectory."""
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise self._failure
        error = self._task.exception()
        if isinstance(error, UserError):
            raise ApiError(503, redact(str(error)), headers=LATER)
        if error is not None:
            logging.getLogger("uvicorn.error").error("a question failed", exc_info=error)
            raise ApiError(500, f"{type(error).__name__} in the service; its log has the details")
        trajectory = self._task.result()
        if trajectory.error is not None and trajectory.error.startswith("time: "):
            message = f"not finished within {self._service.seconds:g} s (--time-limit)"
            raise ApiError(504, message, headers=NEVER)
        if trajectory.error is not None:
            raise ApiError(503, trajectory.error, headers=LATER)
        return trajectory

    async def stream(self, chunk: dict[str, Any] | None) -> AsyncIterator[bytes]:
        """Yield events from the first `chunk` on."""
        try:
            yield _event(self.reply.chunk({"role": "assistant", "content": ""}))
            while chunk is not None:
                yield _event(chunk)
                chunk = await self.chunks.get()
            for chunk in self.reply.last_chunks(await self.trajectory()):
                yield _event(chunk)
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


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
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = message | {"headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            self._check(scope["path"], dict(scope["headers"]))
        except ApiError as error:
            await _refusal(error)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if not self.token and not is_this_machine(host):
            raise ApiError(403, "without a token only this machine is served: open http://localhost")
        if origin and origin.partition("://")[2] != host:
            raise ApiError(403, "pages of other origins are not served")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        is_allowed = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token)
        if self.token and path.startswith("/v1/") and not is_allowed:
            message = "send the header Authorization: Bearer <the service's token>"
            raise ApiError(401, message, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _reply_to_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}; {ROUTES}"
        error = ApiError(error.status_code, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"{type(error).__name__} in the service; its log has the details")
    return _refusal(error)


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


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
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
    files = {
        name: (resources.files(f"calibadv_jax.contrib.{package}") / "static" / name).read_bytes()
        for package, names in STATIC.items()
        for name in names
    }

    async def chat(http: Request) -> Response:
        request = parse(await _body(http), service.model)
        attempt = service.begin(request)
        try:
            if not request.stream:
                return JSONResponse(attempt.reply.whole(await _while_connected(http, attempt.trajectory())))
            first = await _while_connected(http, attempt.chunks.get())
            if first is None:  # it failed before a turn: the reply's status can still say so
                await attempt.trajectory()
        except BaseException:
            await attempt.cancel()
            raise
        end = BackgroundTask(attempt.cancel)  # a client may have left in the middle
        return StreamingResponse(attempt.stream(first), media_type="text/event-stream", background=end)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ready", "model": service.model, "questions": len(service.attempts)})

    async def models(_: Request) -> Response:
        entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "calibadv"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def show(http: Request) -> Response:
        name = http.url.path.removeprefix("/") or "page.html"
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]])

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            *(Route("/" + name.removeprefix("page.html"), show) for name in files),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _reply_to_error),
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
