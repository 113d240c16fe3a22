"""Limits of connections: their number, the size of heads, and the time of a slow client."""

from __future__ import annotations

import asyncio
import itertools
import resource
import select
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SPARE_FILES = 128  # descriptors left for the index, the store and the log
MAX_HEAD = 2**16  # bytes of a request's head, and of what follows a body in chunks; then 400
REPLY = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
BUSY = b'{"error": "all connections are in use; try again later, or start with a larger --max_connections"}'
INVALID = b'{"error": "not a valid HTTP request, or its head is larger than %d bytes"}' % MAX_HEAD


def allowed_connections(asked: int) -> int:
    """Return at most the number of files that may be open; raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asked if hard == resource.RLIM_INFINITY else max(1, min(asked, hard - SPARE_FILES))


class _BoundedHeads(h11.Connection):
    """Refuses heads and trailers above MAX_HEAD bytes; h11 itself accepts any that come in one piece."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._received = self._read = 0  # bytes, and those of events

    def receive_data(self, data: bytes) -> None:
        self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Event):
            before, self._read = self._read, self._received - len(self.trailing_data[0])
            if not isinstance(event, h11.Data) and self._read - before > MAX_HEAD:
                raise h11.RemoteProtocolError("the head is too large")
        return event


class Bounded(H11Protocol):
    """uvicorn's HTTP protocol over h11 with limits, which `bounded_protocol` sets.

    httptools, which uvicorn prefers, keeps heads and trailers of any length. Beyond `max_connections` a new
    connection replaces the one that has waited longest without a request; if all have one, it gets 503.
    """

    max_connections: int
    seconds: float
    _turns = itertools.count()  # not the time: connections of one round of the loop may have the same

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _BoundedHeads()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._turn = next(self._turns)
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        others: list[Any] = [other for other in self.connections if other is not self]
        others = [other for other in others if not other.transport.is_closing()]
        if len(others) < self.max_connections:
            return
        waiting = sorted((other for other in others if other.is_waiting()), key=lambda other: other._turn)
        if victim := next((other for other in waiting if not other.has_unread()), None):
            victim.transport.abort()
        else:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1", BUSY)

    def has_unread(self) -> bool:
        """Whether received bytes are not read yet: the loop accepts many connections before it reads."""
        poll = select.poll()  # unlike `select.select`, for descriptors above 1,023 too
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def send_400_response(self, msg: str) -> None:
        """Reply with JSON as for every other error; uvicorn's own reply is plain text."""
        if self.is_waiting() or not self.cycle.response_started:
            self._refuse(b"400 Bad Request", INVALID)
        self.transport.close()

    def _refuse(self, status: bytes, text: bytes) -> None:
        self.transport.write(REPLY % (status, len(text), text))
        self.transport.close()

    def is_waiting(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self.is_waiting():
            self._turn = next(self._turns)
            self._deadline.cancel()
        elif self._deadline.cancelled():  # the first part of the next request
            self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


def bounded_protocol(max_connections: int, seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol with these limits.

    In `seconds` a client must send a request's head, and take a reply; `BodyLimit` times the body.
    """
    return type("Bounded", (Bounded,), {"max_connections": max_connections, "seconds": seconds})
