"""The HTTP server of an agent: a web page at /, and OpenAI's chat completions at /v1."""

from __future__ import annotations

import asyncio
import hmac
import socket
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from calibadv_jax.contrib.pages.page_server import TYPES, guard_headers, is_this_machine
from calibadv_jax.contrib.serving import connections
from calibadv_jax.contrib.serving.chat import ChatReply, CompletionReply
from calibadv_jax.contrib.serving.chat_request import ApiError, ChatRequest, parse_chat, parse_completion
from calibadv_jax.contrib.serving.connections import bounded_protocol
from calibadv_jax.contrib.serving.service import Service
from calibadv_jax.core.secrets import redact

T = TypeVar("T")

MAX_BODY = 2**18  # bytes of a request's body
MAX_HEAD = 2**16  # bytes of a request's head
MAX_CONNECTIONS = 256
QUEUED_CONNECTIONS = 64  # connections that are accepted at once, and that the system keeps until then
ENDING_SECONDS = 3  # time in which replies are sent when the service ends
ROUTES = (
    "there are GET /, GET /health, GET /v1/models, GET /v1/models/MODEL, POST /v1/chat/completions and POST"
    " /v1/completions"
)
FOLDER = Path(__file__).parent
PAGE = "page.html"  # the file that is served at /
# Files that are served by their names. The last two belong to the trajectory page.
FILES = [
    FOLDER / "static/page.html",
    FOLDER / "static/page.css",
    FOLDER / "static/page.js",
    FOLDER.parent / "pages/static/style.css",
    FOLDER.parent / "pages/static/icon.svg",
]


def guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return the app behind `_refusal`."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        error = _refusal(scope["path"], Headers(scope=scope), token)
        handler = app if error is None else error.response()
        await handler(scope, receive, send)

    return guard


def _refusal(path: str, headers: Headers, token: str) -> ApiError | None:
    """Return the error for other hosts, other origins, and requests without the token.

    Without a token, only names of this machine are taken as the host: another page may have made its own name
    point here. A page elsewhere may never ask: its origin differs from the host.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    if not token and not is_this_machine(host):
        return ApiError(403, "without a token only this machine is served: open http://localhost")
    if origin and origin.partition("://")[2] != host:
        return ApiError(403, "pages of other origins are not served")
    scheme, _, sent_token = headers.get("authorization", "").partition(" ")
    is_token = hmac.compare_digest(sent_token.encode("latin-1").strip(), token.encode())
    is_authorized = is_token and scheme.lower() == "bearer"
    needs_token = bool(token) and path.startswith("/v1/")
    if needs_token and not is_authorized:
        message = "send the header Authorization: Bearer <the service's token>"
        return ApiError(401, message, {"WWW-Authenticate": "Bearer"})
    return None


async def _reply_to_error(request: Request, error: Any) -> Response:
    """Return an error as JSON; errors of the router get the list of routes."""
    if not isinstance(error, ApiError):
        message = f"{request.method} {request.url.path}: {error.detail}; {ROUTES}"
        error = ApiError(error.status_code, message, error.headers)
    return error.response()


async def _body(request: Request) -> bytes:
    """Return a JSON body; raise ApiError if it is too large, too slow, or what a page elsewhere can send."""
    content_type, _, _ = request.headers.get("content-type", "").partition(";")
    if content_type.strip().lower() != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    body = bytearray()
    num_bytes = 0
    seconds = connections.CLIENT_SECONDS
    try:
        async with asyncio.timeout(seconds):
            # A body that is too large is read to its end: many clients read a reply only after it.
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= MAX_BODY:
                    body += part
    except TimeoutError as error:
        raise ApiError(408, f"the body took longer than {seconds:g} s", {"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has left") from error
    if num_bytes > MAX_BODY:
        raise ApiError(413, f"the body has {num_bytes} bytes, but at most {MAX_BODY} are taken")
    return bytes(body)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work, or cancel it and raise ApiError if the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def make_app(service: Service) -> Starlette:
    """Return the app with all routes, without its guard."""
    contents = {path.name: path.read_bytes() for path in FILES}
    protocol = service.rollouts.context.protocol

    async def reply_to(http: Request, request: ChatRequest, kind: type[ChatReply]) -> Response:
        request = service.fitted(request)
        reply = kind(request, protocol)
        turns = service.answer(request)
        if not request.stream:
            return JSONResponse(await _while_connected(http, reply.whole(turns)))
        # A question that fails before its first turn is still a reply with the status of the failure.
        first = await _while_connected(http, anext(turns))
        return StreamingResponse(
            reply.events(first, turns),
            media_type="text/event-stream",
            background=BackgroundTask(turns.aclose),  # a client may have left in the middle
        )

    async def chat(http: Request) -> Response:
        request = parse_chat(await _body(http), service.model, protocol.action_names)
        return await reply_to(http, request, ChatReply)

    async def complete(http: Request) -> Response:
        request = parse_completion(await _body(http), service.model, protocol.action_names)
        return await reply_to(http, request, CompletionReply)

    async def health(_: Request) -> Response:
        state: dict[str, Any] = {
            "status": "ready",
            "model": service.model,
            "questions": len(service.attempts),
        }
        fault = await service.retriever_fault() if service.retriever_fault else ""
        if fault:
            state |= {"status": "the retriever does not answer", "retriever": redact(fault)}
        return JSONResponse(state, 503 if fault else 200)

    entry = {"id": service.model, "object": "model", "created": 0, "owned_by": "calibadv"}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def examples(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(service.examples)})

    async def model(http: Request) -> Response:
        if http.path_params["model"] != service.model:
            raise ApiError(404, f"model: there is {service.model!r} only")
        return JSONResponse(entry)

    async def show(http: Request) -> Response:
        name = http.url.path.removeprefix("/") or PAGE
        _, _, ending = name.rpartition(".")
        return Response(contents[name], media_type=TYPES[ending])

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/examples", examples),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/health", health),
    ]
    for name in contents:
        address = "/" if name == PAGE else f"/{name}"
        routes.append(Route(address, show))
    return Starlette(routes=routes, exception_handlers={HTTPException: _reply_to_error})


@contextmanager
def serving(service: Service, listener: socket.socket, token: str) -> Iterator[Future[None]]:
    """Serve within the block.

    Args:
        service: answers the questions.
        listener: a bound socket.
        token: what clients must send; empty: nothing, but only this machine is served.

    Yields:
        A future that is done when the server has ended.
    """
    config = uvicorn.Config(
        guarded(make_app(service), token),
        http=bounded_protocol(MAX_CONNECTIONS),
        backlog=QUEUED_CONNECTIONS,
        ws="none",
        lifespan="off",
        log_config=None,  # warnings go to standard error
        access_log=False,
        headers=list(guard_headers().items()),
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
