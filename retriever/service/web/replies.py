"""Replies of any size, made beside the event loop and sent in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from itertools import chain
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

T = TypeVar("T")

PIECE = 2**18  # bytes, about: what a reply takes of memory while it is sent
JSON = "application/json"


class Left(Exception):
    """The client has closed its connection before it had a reply."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; it is cancelled if the client leaves.

    Args:
        request: whose body was read.

    Raises:
        Left: it has left.
    """
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
    """A reply of so much JSON; with its length if it is one piece, as nearly all are.

    Args:
        parts: are asked for in other threads, when the client has taken what came before.
    """
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
