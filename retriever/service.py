"""The HTTP service."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from retriever.index import Index
from retriever.protocol import MAX_QUERY_LENGTH, RetrieveRequest, render


def make_app(index: Index, topk: int) -> FastAPI:
    """``POST /retrieve`` and ``GET /health`` over a loaded index.

    Args:
        topk: documents per query where the request does not say.
    """
    app = FastAPI(title="calibadv retriever")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in error.errors()]
        return JSONResponse({"error": "; ".join(problems)}, status_code=422)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ready", **index.manifest}

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> JSONResponse:
        long = [number for number, query in enumerate(request.queries) if len(query) > MAX_QUERY_LENGTH]
        if long:
            message = f"queries.{long[0]}: longer than {MAX_QUERY_LENGTH} characters; shorten it"
            return JSONResponse({"error": message}, status_code=422)
        if request.topk_rerank is not None:
            message = "topk_rerank: no reranker is loaded; leave it out and set topk_retrieval alone"
            return JSONResponse({"error": message}, status_code=422)
        # FAISS and NumPy release the GIL: the event loop keeps answering while they work.
        found = await run_in_threadpool(index.search, request.queries, request.depth(topk))
        return JSONResponse(render(request, found))

    return app
