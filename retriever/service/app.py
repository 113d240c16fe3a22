"""The HTTP service: its routes, and the replies to errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from retriever.corpus.pages import Pages
from retriever.encoders.reranker import Reranker
from retriever.errors import RequestFailed, RetrieverError, Unavailable
from retriever.interfaces import Searcher
from retriever.service.cache import ResultCache
from retriever.service.identity import index_identity
from retriever.service.limits import Limits
from retriever.service.metrics import Metrics
from retriever.service.middleware import BodyLimit, Measure, RequireToken
from retriever.service.replies import error_reply, render, render_pages, reply_with, while_connected
from retriever.service.schemas import AccessRequest, RetrieveRequest
from retriever.service.search_engine import Engine

TITLE = "calibadv retriever"
# Seconds after which a refused client may come back.
RETRY_SECONDS = 1
# Errors that `_reply_to_error` turns into replies.
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
    """Return the routes over a loaded index.

    Args:
        searcher: Answers the queries.
        topk: Documents to retrieve for each query of a request that does not say.
        rerank_topk: Documents to keep after reranking for each query of a request that does not say.
        reranker: Orders the documents of CalibAdv's requests; None for no reranking.
        cache: The result store; None for none.
        pages: Pages for POST /access; None for none.
        limits: None for the defaults.
        token: Bearer token that all requests but those of /health need; empty for none.

    Returns:
        The ASGI application.
    """
    # The page at /docs loads its scripts from the service: a cluster's nodes reach no CDN.
    app = FastAPIOffline(title=TITLE, redoc_url=None)
    metrics = Metrics()
    limits = limits or Limits()
    engine = Engine(searcher, topk, rerank_topk, limits, metrics, reranker, cache)
    model = reranker.model if reranker else ""
    identity = index_identity(searcher.manifest, model, pages.sha256 if pages else "")
    for kind in ERRORS:
        app.add_exception_handler(kind, _reply_to_error)
    # The last one added is the first that sees a request.
    app.add_middleware(
        BodyLimit, max_body=limits.max_body, max_bodies=limits.max_bodies, seconds=limits.request_seconds
    )
    if token:
        app.add_middleware(RequireToken, token=token)
    app.add_middleware(Measure, metrics=metrics, identity=identity)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Return the manifest of the index, the models, and the identity of what is searched."""
        state = {"status": "ready", **searcher.manifest, "reranker": model}
        if pages:
            state["pages_sha256"] = pages.sha256
        state["identity"] = identity
        return state

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest, http: Request) -> Response:
        """Return the best documents of each query."""
        answer = engine.answer(request)
        if cache:
            # The search is finished even if the client leaves: it comes back for the stored results.
            hits = await answer
        else:
            hits = await while_connected(http, answer)
        return await reply_with(render(request, hits))

    @app.post("/access")
    async def access(request: AccessRequest) -> Response:
        """Return the page of each URL, or null."""
        if pages is None:
            return error_reply(404, "no pages are loaded; start the service with --pages_path")
        rows = await run_in_threadpool(_access_pages, pages, request.urls)
        return await reply_with(render_pages(rows))

    return app


def _access_pages(pages: Pages, urls: list[str]) -> list[dict[str, Any] | None]:
    return [pages.access(url) for url in urls]


async def _reply_to_error(request: Request, error: Exception) -> JSONResponse:
    """Return the reply of one line to an error."""
    retry_later = {"Retry-After": str(RETRY_SECONDS)}
    match error:
        case RequestValidationError():
            return error_reply(422, _validation_message(error))
        case HTTPException():
            message = f"{request.method} {request.url.path}: {error.detail}"
            if error.status_code in (404, 405):
                message += "; there are POST /retrieve, POST /access, GET /health, GET /metrics and GET /docs"
            return error_reply(error.status_code, message, dict(error.headers or {}))
        case RequestFailed():
            headers = retry_later if error.status == 503 else None
            return error_reply(error.status, str(error), headers)
        case Unavailable():
            return error_reply(503, str(error), retry_later)
        case RetrieverError():
            return error_reply(500, str(error))
    return error_reply(500, f"{type(error).__name__} in the service; its log has the details")


def _validation_message(error: RequestValidationError) -> str:
    """Return the fields that are wrong, and what is wrong with them."""
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"][1:])
        problems.append(f"{field}: {item['msg']}")
    return "; ".join(problems)
