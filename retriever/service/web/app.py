"""The HTTP service's routes, and errors that say what to change."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from retriever.corpus.pages import Pages
from retriever.errors import RetrieverError, Unavailable
from retriever.interfaces import Searcher
from retriever.search.backends.web import SearchFailed
from retriever.search.rerank import Reranker
from retriever.service.batching import Overloaded
from retriever.service.cache import NotRecorded, ResultCache
from retriever.service.engine import Depths, Engine, Limits, Refused
from retriever.service.identity import index_identity
from retriever.service.metrics import Metrics
from retriever.service.web.contracts import AccessRequest, RetrieveRequest, error_reply, render, render_pages
from retriever.service.web.middleware import BodyLimit, Identify, Measure, RequireToken
from retriever.service.web.replies import reply_with, while_connected

TITLE = "calibadv retriever"
RETRY_SECONDS = 1  # what a refused client is told to wait


def make_app(
    searcher: Searcher,
    depths: Depths,
    *,
    reranker: Reranker | None = None,
    cache: ResultCache | None = None,
    pages: Pages | None = None,
    limits: Limits | None = None,
    token: str = "",
) -> FastAPI:
    """``POST /retrieve``, ``POST /access``, ``GET /health`` and ``GET /metrics`` over a loaded index.

    Args:
        token: if it is not empty, every route but /health asks for ``Authorization: Bearer <token>``.
    """
    app = _make_fastapi()
    metrics, limits = Metrics(), limits or Limits()
    engine = Engine(searcher, depths, limits, metrics, reranker, cache)
    _add_error_replies(app)
    # The last one added is the first that sees a request.
    app.add_middleware(
        BodyLimit, max_body=limits.max_body, max_bodies=limits.max_bodies, seconds=limits.request_seconds
    )
    if token:
        app.add_middleware(RequireToken, token=token)
    model = reranker.model if reranker else ""
    identity = index_identity(searcher.manifest, model, pages.sha256 if pages else "")
    app.add_middleware(Identify, identity=identity)
    app.add_middleware(Measure, metrics=metrics)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        of_pages = {"pages_sha256": pages.sha256} if pages else {}
        return {"status": "ready", **searcher.manifest, "reranker": model, **of_pages, "identity": identity}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest, http: Request) -> Response:
        # What is to be stored is finished also for a client that leaves: it comes back and finds it there.
        answer = engine.answer(request)
        found = await (answer if cache else while_connected(http, answer))
        return await reply_with(render(request, found))

    @app.post("/access")
    async def access(request: AccessRequest) -> Response:
        if pages is None:
            return error_reply(404, "no pages are loaded; start the service with --pages_path")
        rows = await run_in_threadpool(lambda: [pages.access(url) for url in request.urls])
        return await reply_with(render_pages(rows))

    return app


def _make_fastapi() -> FastAPI:
    """With a page at /docs whose scripts come from here: a cluster's nodes reach no CDN."""
    if importlib.util.find_spec("fastapi_offline") is not None:
        offline: FastAPI = importlib.import_module("fastapi_offline").FastAPIOffline(
            title=TITLE, redoc_url=None
        )
        return offline
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> JSONResponse:
        return error_reply(404, "the page needs pip install fastapi-offline; /openapi.json has its content")

    return app


def _add_error_replies(app: FastAPI) -> None:
    """Every error is a JSON body that says what to change."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()]
        return error_reply(422, "; ".join(problems))

    @app.exception_handler(Refused)
    async def not_taken(_: Request, error: Refused) -> JSONResponse:
        return error_reply(422, str(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        known = "; there are POST /retrieve, POST /access, GET /health, GET /metrics and GET /docs"
        advice = known if error.status_code in (404, 405) else ""
        message = f"{request.method} {request.url.path}: {error.detail}{advice}"
        return error_reply(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(Overloaded)
    async def overloaded(*_: object) -> JSONResponse:
        message = "too many queries wait; try again later, or start more services"
        return error_reply(503, message, {"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(NotRecorded)
    async def not_recorded(_: Request, error: NotRecorded) -> JSONResponse:
        query = str(error)[:200]
        return error_reply(409, f"replay: query {query!r} was not recorded; run with --cache_mode use")

    @app.exception_handler(SearchFailed)
    async def not_answered(_: Request, error: SearchFailed) -> JSONResponse:
        return error_reply(error.status, str(error))

    @app.exception_handler(RetrieverError)
    async def broken(_: Request, error: RetrieverError) -> JSONResponse:
        return error_reply(500, str(error))

    @app.exception_handler(Unavailable)
    async def away(_: Request, error: Unavailable) -> JSONResponse:
        return error_reply(503, str(error), {"Retry-After": str(RETRY_SECONDS)})

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return error_reply(500, f"{type(error).__name__} in the service; its log has the details")
