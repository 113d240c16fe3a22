"""Requests and replies of ``POST /retrieve`` and ``/access``. The fields of a request select its contract:

| client | fields | item of a query's list |
|---|---|---|
| Search-R1, verl, SkyRL | queries, topk, return_scores true | {"document": corpus row, "score"} |
| RLinf | queries, topk, return_scores false | the corpus row |
| CalibAdv authors | queries, topk_retrieval, topk_rerank, … | {"document": contents, "score", "id"} |

Replies of any size are made beside the event loop and sent in pieces.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Iterator
from itertools import chain
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from retriever.interfaces import CorpusRow, Hits

MAX_QUERY_LENGTH = 8192  # characters; what comes after them is cut off
MAX_TOPK = 1000
MAX_URLS = 256

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class RetrieveRequest(BaseModel):
    """A request of any of the three contracts."""

    model_config = ConfigDict(extra="forbid")

    queries: list[str]
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1, le=MAX_TOPK)
    topk_rerank: int | None = Field(None, ge=1, le=MAX_TOPK)
    not_sort: bool = False

    @property
    def is_calibadv(self) -> bool:
        return self.topk_retrieval is not None or self.topk_rerank is not None

    def depth(self, default: int) -> int:
        """Return the number of documents to retrieve for each query."""
        return (self.topk_retrieval if self.is_calibadv else self.topk) or default


class AccessRequest(BaseModel):
    """RLinf's page access."""

    model_config = ConfigDict(extra="forbid")

    urls: list[str] = Field(min_length=1, max_length=MAX_URLS)


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


def render_pages(rows: list[CorpusRow | None]) -> Iterator[str]:
    """Yield the parts of the JSON of ``POST /access``."""
    yield '{"result":['
    for number, row in enumerate(rows):
        yield ("," if number else "") + to_json(row)
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


class Left(Exception):
    """The client has closed its connection before it had a reply."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, or cancel it and raise Left if the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Left
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
