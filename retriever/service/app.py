"""The HTTP service: routes, replies to errors, and middleware."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import Coroutine, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from retriever.corpus.pages import Pages
from retriever.encoders.reranker import Reranker
from retriever.errors import RequestFailed, RetrieverError, Unavailable
from retriever.interfaces import CorpusRow, Hits, Searcher
from retriever.service.cache import ResultCache
from retriever.service.engine import AccessRequest, Engine, Limits, Metrics, RetrieveRequest

HEADER = "X-Index-Identity"  # of every reply of POST /retrieve and POST /access
IDENTITY_LENGTH = 32  # hexadecimal digits
# Place and file format of an index: copies, and engines that search exactly, answer alike.
_IRRELEVANT = ("kind", "bytes", "checksums", "url")
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def index_identity(manifest: Mapping[str, Any], reranker: str, pages: str = "") -> str:
    """Return a hash of corpus, encoder, approximation, reranker model and hash of the pages.

    Services over copies of one index have the same, wherever they run.
    """
    decisive = {name: value for name, value in manifest.items() if name not in _IRRELEVANT}
    text = json.dumps([decisive, reranker, *([pages] if pages else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_LENGTH]


def render(request: RetrieveRequest, hits: list[Hits]) -> Iterator[str]:
    """Yield the parts of the reply's JSON in the contract of the request; raises ValueError before them."""
    scores = (score for hits_of_query in hits for _, score in hits_of_query)
    if request.return_scores and not all(map(math.isfinite, scores)):
        raise ValueError("a score is no finite number")
    yield '{"result":['
    for number, hits_of_query in enumerate(hits):
        yield ",[" if number else "["
        for rank, (row, score) in enumerate(hits_of_query):
            yield ("," if rank else "") + to_json(_item(request, row, score))
        yield "]"
    yield "]}"


def error_reply(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _item(request: RetrieveRequest, row: CorpusRow, score: float) -> Any:
    if not request.is_calibadv:
        return {"document": row, "score": score} if request.return_scores else row
    contents = row["contents"]
    return {"document": contents, "score": score, "id": row.get("id")} if request.return_scores else contents


T = TypeVar("T")

PIECE = 2**18  # bytes, about: what a reply takes of memory while it is sent
JSON = "application/json"


class ClientDisconnected(Exception):
    """The client has closed its connection before it had a reply."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, or cancel it and raise ClientDisconnected if the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def reply_with(parts: Iterator[str]) -> Response:
    """Reply with JSON parts, computed in other threads; with a length if it is one piece, as most are."""
    pieces = _pieces(parts)
    first = await run_in_threadpool(next, pieces)
    second = await run_in_threadpool(next, pieces, None) if len(first) >= PIECE else None
    if second is None:
        return Response(first, media_type=JSON)
    return StreamingResponse(chain((first, second), pieces), media_type=JSON)


def _pieces(parts: Iterator[str]) -> Iterator[bytes]:
    piece = bytearray()
    for part in parts:
        piece += part.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


ROUTES = {"/retrieve", "/access", "/health", "/metrics"}  # a label each; the others share one
OPEN_ROUTE = "/health"  # answers without a token
BODYLESS = ("GET", "HEAD")  # their bodies mean nothing, and are not read


class Measure:
    """ASGI middleware: counts and times requests by route and status, and adds the index identity to replies
    of ``/retrieve`` and ``/access``."""

    def __init__(self, app: Any, metrics: Metrics, identity: str):
        self.app, self.metrics = app, metrics
        self.header = (HEADER.lower().encode(), identity.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        begun, status = time.monotonic(), 500  # if the application fails before it answers

        async def send_and_note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if route in ("/retrieve", "/access"):
                    message = message | {"headers": [*message.get("headers", ()), self.header]}
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - begun)


class RequireToken:
    """ASGI middleware: without ``Authorization: Bearer <token>`` a request gets 401, its body unread."""

    def __init__(self, app: Any, token: str):
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] == "http" and scope["path"] == OPEN_ROUTE and scope["method"] in BODYLESS
        if scope["type"] == "http" and not is_open and not self._is_allowed(scope["headers"]):
            message = "send the header Authorization: Bearer <the service's token>"
            await error_reply(401, message, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        scheme, _, token = dict(headers).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.token)


class BodyLimit:
    """ASGI middleware: bounds memory and time of requests' bodies.

    A body beyond `max_body` bytes gets 413, one that takes longer than `seconds` 408, neither read to its
    end. One that would bring all bodies under way above `max_bodies` bytes gets 503.
    """

    def __init__(self, app: Any, max_body: int, max_bodies: int = 2**27, seconds: float = 30.0):
        self.app, self.max_body, self.max_bodies, self.seconds = app, max_body, max_bodies, seconds
        self._held = 0  # bytes, of all requests under way

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] in BODYLESS:
            await self.app(scope, _replay(b"", receive), send)
            return
        body = bytearray()  # grows in place, however small the parts
        try:
            refusal = await self._read(body, scope, receive)
            if refusal is None:
                await self.app(scope, _replay(bytes(body), receive), send)
            else:
                await refusal(scope, receive, send)
        except ClientDisconnected:
            return
        finally:
            self._held -= len(body)

    async def _read(self, body: bytearray, scope: Any, receive: Any) -> Response | None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        is_number = declared.isdigit() and len(declared) < 20
        expected = int(declared) if is_number else self.max_body + 1
        more = True
        try:
            async with asyncio.timeout(self.seconds):
                while more and max(expected, len(body)) <= self.max_body and self._held <= self.max_bodies:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"the body took longer than {self.seconds:g} s; send it faster, or raise --request_seconds"
            return error_reply(408, text, {"Connection": "close"})
        if max(expected, len(body)) > self.max_body:
            text = f"the body is larger than {self.max_body} bytes; send fewer queries at once"
            return error_reply(413, text)
        if self._held > self.max_bodies:
            text = "the requests under way take all the memory they may; try again later"
            return error_reply(503, text, {"Retry-After": "1"})
        return None


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI receive that gives the whole body, then messages of `receive`."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(messages, None) or await receive()

    return replay


TITLE = "calibadv retriever"
RETRY_SECONDS = 1  # for a refused client
ERRORS = (RequestValidationError, HTTPException, RequestFailed, Unavailable, RetrieverError, Exception)


def make_app(
    searcher: Searcher,
    topk: int,
    rerank_topk: int = 3,
    *,
    reranker: Reranker | None = None,
    cache: ResultCache | None = None,
    pages: Pages | None = None,
    limits: Limits | None = None,
    token: str = "",
) -> FastAPI:
    """Return the routes over a loaded index; with a `token`, all but /health need it as bearer token.

    `topk` documents are retrieved, `rerank_topk` kept by the reranker, unless a request says otherwise.
    """
    # The page at /docs loads its scripts from the service: a cluster's nodes reach no CDN.
    app = FastAPIOffline(title=TITLE, redoc_url=None)
    metrics, limits = Metrics(), limits or Limits()
    engine = Engine(searcher, topk, rerank_topk, limits, metrics, reranker, cache)
    for kind in ERRORS:
        app.add_exception_handler(kind, _reply_to_error)
    # The last one added is the first that sees a request.
    app.add_middleware(
        BodyLimit, max_body=limits.max_body, max_bodies=limits.max_bodies, seconds=limits.request_seconds
    )
    if token:
        app.add_middleware(RequireToken, token=token)
    model = reranker.model if reranker else ""
    identity = index_identity(searcher.manifest, model, pages.sha256 if pages else "")
    app.add_middleware(Measure, metrics=metrics, identity=identity)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        hashes = {"pages_sha256": pages.sha256} if pages else {}
        return {"status": "ready", **searcher.manifest, "reranker": model, **hashes, "identity": identity}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest, http: Request) -> Response:
        # With a store the search is finished even if the client leaves: it comes back for the results.
        answer = engine.answer(request)
        hits = await (answer if cache else while_connected(http, answer))
        return await reply_with(render(request, hits))

    @app.post("/access")
    async def access(request: AccessRequest) -> Response:
        if pages is None:
            return error_reply(404, "no pages are loaded; start the service with --pages_path")
        rows = await run_in_threadpool(lambda: [pages.access(url) for url in request.urls])
        items = (("," if number else "") + to_json(row) for number, row in enumerate(rows))
        return await reply_with(chain(['{"result":['], items, ["]}"]))

    return app


async def _reply_to_error(request: Request, error: Exception) -> JSONResponse:
    later = {"Retry-After": str(RETRY_SECONDS)}
    match error:
        case RequestValidationError():
            problems = [f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()]
            return error_reply(422, "; ".join(problems))
        case HTTPException():
            routes = "; there are POST /retrieve, POST /access, GET /health, GET /metrics and GET /docs"
            advice = routes if error.status_code in (404, 405) else ""
            message = f"{request.method} {request.url.path}: {error.detail}{advice}"
            return error_reply(error.status_code, message, dict(error.headers or {}))
        case RequestFailed():
            return error_reply(error.status, str(error), later if error.status == 503 else None)
        case Unavailable():
            return error_reply(503, str(error), later)
        case RetrieverError():
            return error_reply(500, str(error))
    return error_reply(500, f"{type(error).__name__} in the service; its log has the details")
