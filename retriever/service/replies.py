"""Replies of the service: JSON in pieces, errors, and the end of work whose client has left."""

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

from retriever.interfaces import CorpusRow, Hits
from retriever.service.schemas import RetrieveRequest

T = TypeVar("T")

# Bytes of a piece of a reply, about: the memory that a reply takes while it is sent.
PIECE = 2**18
JSON = "application/json"
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ClientDisconnected(Exception):
    """The client has closed its connection before it had a reply."""


def error_reply(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the reply to a failed request: one line as ``{"error": ...}``."""
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def render(request: RetrieveRequest, hits: list[Hits]) -> Iterator[str]:
    """Write the reply of POST /retrieve in the contract of the request.

    Args:
        request: The request.
        hits: Documents and scores of each query.

    Yields:
        Parts of the JSON.

    Raises:
        ValueError: A score that is to be sent is not finite; raised before the first part.
    """
    if request.return_scores:
        _check_finite(hits)
    yield '{"result":['
    for number, hits_of_query in enumerate(hits):
        yield ",[" if number else "["
        for rank, (row, score) in enumerate(hits_of_query):
            item = to_json(_item(request, row, score))
            yield f",{item}" if rank else item
        yield "]"
    yield "]}"


def _check_finite(hits: list[Hits]) -> None:
    for hits_of_query in hits:
        for _, score in hits_of_query:
            if not math.isfinite(score):
                raise ValueError("a score is no finite number")


def _item(request: RetrieveRequest, row: CorpusRow, score: float) -> Any:
    """Return what a client gets of a document: a row, or its text in CalibAdv's contract."""
    if request.is_calibadv:
        contents = row["contents"]
        if request.return_scores:
            return {"document": contents, "score": score, "id": row.get("id")}
        return contents
    if request.return_scores:
        return {"document": row, "score": score}
    return row


def render_pages(rows: list[dict[str, Any] | None]) -> Iterator[str]:
    """Write the reply of POST /access.

    Args:
        rows: The row of each URL, or None.

    Yields:
        Parts of the JSON.
    """
    yield '{"result":['
    for number, row in enumerate(rows):
        item = to_json(row)
        yield f",{item}" if number else item
    yield "]}"


async def reply_with(parts: Iterator[str]) -> Response:
    """Reply with JSON; with its length if it is one piece, as most are.

    Args:
        parts: Parts of the JSON, at least one; they are computed in other threads.

    Returns:
        The reply.
    """
    pieces = _pieces(parts)
    first = await run_in_threadpool(next, pieces)
    second = None
    if len(first) >= PIECE:
        second = await run_in_threadpool(next, pieces, None)
    if second is None:
        return Response(first, media_type=JSON)
    return StreamingResponse(chain((first, second), pieces), media_type=JSON)


def _pieces(parts: Iterator[str]) -> Iterator[bytes]:
    """Join parts into pieces of PIECE bytes or a little more."""
    piece = bytearray()
    for part in parts:
        piece += part.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, but no longer than the client is connected.

    Args:
        request: A request whose body was read.
        work: The work; it is cancelled if the client leaves.

    Returns:
        The result of the work.

    Raises:
        ClientDisconnected: The client has left before the work was done.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
