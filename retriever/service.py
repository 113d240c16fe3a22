"""The HTTP service: contracts, batching, limits, errors that say what to change."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.exceptions import HTTPException

from retriever.batching import Overloaded, SearchBatcher
from retriever.cache import NotRecorded, ResultCache
from retriever.memory import trimmed
from retriever.pages import Pages
from retriever.protocol import MAX_QUERY_LENGTH, AccessRequest, Found, RetrieveRequest, render
from retriever.rerank import Reranker
from retriever.web_search import SearchFailed

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
RETRY_SECONDS = 1  # what a refused client is told to wait


class Searcher(Protocol):
    """What the service needs of an index."""

    manifest: dict[str, Any]

    def search(self, queries: Sequence[str], k: int) -> Sequence[Found | Exception]: ...


@dataclass(frozen=True)
class Limits:
    """What one service takes on."""

    max_batch: int = 256  # queries of one search
    max_queue: int = 8192  # queries that wait; then 503
    max_wait: float = 0.002  # seconds a search waits for others to join
    max_body: int = 16 * 2**20  # bytes of a request


class Metrics:
    """Prometheus metrics of one service."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("retriever_requests", "Requests", ["route", "status"], registry=registry)
        self.seconds = Histogram("retriever_request_seconds", "Time to answer", ["route"], registry=registry)
        self.batch = Histogram(
            "retriever_batch_queries", "Queries of a search", buckets=BATCH_SIZES, registry=registry
        )
        self.queue = Gauge("retriever_queued_queries", "Queries that wait", registry=registry)
        self.cached = Counter("retriever_cached_queries", "Answered from the store", registry=registry)


class Engine:
    """Search, rerank and result store behind one call."""

    def __init__(
        self,
        index: Searcher,
        reranker: Reranker | None,
        cache: ResultCache | None,
        limits: Limits,
        metrics: Metrics,
    ):
        self.reranker, self.cache, self.metrics = reranker, cache, metrics
        self.batcher = SearchBatcher(
            trimmed(index.search),
            limits.max_batch,
            limits.max_queue,
            limits.max_wait,
            metrics.batch.observe,
        )
        metrics.queue.set_function(lambda: self.batcher.queued)

    async def search(self, queries: list[str], k: int) -> list[Found]:
        """The k best rows of each query; raises Overloaded, NotRecorded, or why a query was not answered."""
        if self.cache is None:
            return _all_found(await self.batcher.search(queries, k))
        known = await run_in_threadpool(self.cache.look_up, queries, k)
        missing = [number for number, found in enumerate(known) if found is None]
        self.metrics.cached.inc(len(known) - len(missing))
        if missing:
            asked = [queries[number] for number in missing]
            outcomes = await self.batcher.search(asked, k)
            # What was found is kept even if another query failed: it may have been paid for.
            fresh = {
                query: one
                for query, one in zip(asked, outcomes, strict=True)
                if not isinstance(one, BaseException)
            }
            await run_in_threadpool(self.cache.store, list(fresh), k, list(fresh.values()))
            for number, one in zip(missing, _all_found(outcomes), strict=True):
                known[number] = one
        return [one for one in known if one is not None]


def _all_found(outcomes: Sequence[Found | BaseException]) -> list[Found]:
    found = []
    for one in outcomes:
        if isinstance(one, BaseException):
            raise one
        found.append(one)
    return found


def make_app(
    index: Searcher,
    topk: int,
    *,
    rerank_topk: int = 3,
    reranker: Reranker | None = None,
    cache: ResultCache | None = None,
    pages: Pages | None = None,
    limits: Limits = Limits(),
    token: str = "",
) -> FastAPI:
    """``POST /retrieve``, ``POST /access``, ``GET /health`` and ``GET /metrics`` over a loaded index.

    Args:
        topk: documents per query where the request does not say.
        rerank_topk: documents kept by the reranker where a CalibAdv request does not say.
        token: where not empty, every route but /health asks for ``Authorization: Bearer <token>``.
    """
    app = FastAPI(title="calibadv retriever")
    metrics = Metrics()
    engine = Engine(index, reranker, cache, limits, metrics)
    _add_error_replies(app)
    _add_measures(app, metrics, token)
    app.add_middleware(BodyLimit, max_body=limits.max_body)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ready", **index.manifest}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> JSONResponse:
        long = [number for number, query in enumerate(request.queries) if len(query) > MAX_QUERY_LENGTH]
        if long:
            return _error(422, f"queries.{long[0]}: longer than {MAX_QUERY_LENGTH} characters; shorten it")
        if request.topk_rerank is not None and reranker is None:
            return _error(
                422, "topk_rerank: no reranker is loaded; leave it out, or start with --reranker_model"
            )
        found = await engine.search(request.queries, request.depth(topk))
        if reranker is not None and request.is_calibadv:
            keep = request.topk_rerank or rerank_topk
            found = await run_in_threadpool(reranker.rerank, request.queries, found, keep, request.not_sort)
        return JSONResponse(render(request, found))

    @app.post("/access")
    async def access(request: AccessRequest) -> JSONResponse:
        if pages is None:
            return _error(404, "no pages are loaded; start the service with --pages_path")
        rows = await run_in_threadpool(lambda: [pages.access(url) for url in request.urls])
        return JSONResponse({"result": rows})

    return app


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _add_error_replies(app: FastAPI) -> None:
    """Every error is a JSON body that says what to change."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()]
        return _error(422, "; ".join(problems))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        known = "; there are POST /retrieve, POST /access, GET /health, GET /metrics and GET /docs"
        advice = known if error.status_code in (404, 405) else ""
        headers = dict(error.headers or {})
        return _error(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}{advice}", headers
        )

    @app.exception_handler(Overloaded)
    async def overloaded(*_: object) -> JSONResponse:
        message = "too many queries wait; try again later, or start more services"
        return _error(503, message, {"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(NotRecorded)
    async def not_recorded(_: Request, error: NotRecorded) -> JSONResponse:
        return _error(409, f"replay: query {str(error)[:200]!r} was not recorded; run with --cache_mode use")

    @app.exception_handler(SearchFailed)
    async def not_answered(_: Request, error: SearchFailed) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__} in the service; its log has the details")


def _add_measures(app: FastAPI, metrics: Metrics, token: str) -> None:
    routes = {"/retrieve", "/access", "/health", "/metrics"}

    @app.middleware("http")
    async def measure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        route = request.url.path if request.url.path in routes else "other"
        begun = time.monotonic()
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and route != "/health" and not hmac.compare_digest(given.encode(), token.encode()):
            response: Response = _error(401, "send the header Authorization: Bearer <the service's token>")
        else:
            response = await call_next(request)
        metrics.requests.labels(route, str(response.status_code)).inc()
        metrics.seconds.labels(route).observe(time.monotonic() - begun)
        return response


class BodyLimit:
    """ASGI middleware: a request body beyond `max_body` bytes is answered with 413 and not read on."""

    def __init__(self, app: Any, max_body: int):
        self.app, self.max_body = app, max_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body, more = b"", declared.isdigit() and int(declared) <= self.max_body
        complete = more
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            complete = len(body) <= self.max_body
            more = complete and message.get("more_body", False)
        if not complete:
            reply = _error(413, f"the body is larger than {self.max_body} bytes; send fewer queries at once")
            await reply(scope, receive, send)
            return
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)
