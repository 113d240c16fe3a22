"""HTTP over h11 with limits: on connections, on the length of heads, and on the time a client takes."""

from __future__ import annotations

import asyncio
import resource
import select
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Descriptors left for the index, the store and the log.
SPARE_FILES = 128
# Bytes of a request's head, and of what follows a body in chunks; beyond, 400.
MAX_HEAD = 2**16
# A reply that is written without uvicorn: status, length and JSON.
REPLY = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
BUSY = b'{"error": "all connections are in use; try again later, or start with a larger --max_connections"}'
INVALID = b'{"error": "not a valid HTTP request, or its head is larger than %d bytes"}' % MAX_HEAD


def allowed_connections(limit: int) -> int:
    """Raise the number of files that this process may open, and return how many may be connections.

    Args:
        limit: Connections that are asked for.

    Returns:
        `limit`, or fewer if the system's hard limit on open files is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return max(1, min(limit, hard - SPARE_FILES))
    if soft != resource.RLIM_INFINITY:  # macOS refuses a soft limit without a number
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit + SPARE_FILES), hard))
    return limit


class _BoundedHeads(h11.Connection):
    """Refuses heads and trailers above MAX_HEAD bytes; h11 itself accepts any that come in one piece."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        # Bytes received so far, and how many of them the events so far have taken.
        self._received = 0
        self._taken = 0

    def receive_data(self, data: bytes) -> None:
        """Count the bytes."""
        self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """Raise RemoteProtocolError for an event other than data that took more than MAX_HEAD bytes."""
        event = super().next_event()
        if isinstance(event, h11.Event):
            taken_before = self._taken
            unread = len(self.trailing_data[0])
            self._taken = self._received - unread
            if not isinstance(event, h11.Data) and self._taken - taken_before > MAX_HEAD:
                raise h11.RemoteProtocolError("the head is too large")
        return event


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol over h11 with limits, which `bounded_protocol` sets.

    httptools, which uvicorn prefers, keeps heads and trailers of any length. Beyond `max_connections` a new
    connection replaces the one that has waited longest without a request; if all have one, it gets 503. The
    work for a new connection does not depend on the number of open ones.

    Attributes:
        max_connections: Open connections.
        seconds: Seconds for a client to send a request's head, and to take a reply.
        waiting: Connections without a request, in the order in which they began to wait.
        ending: Connections that were closed to make room, until the loop has removed them.
    """

    max_connections: int
    seconds: float
    waiting: OrderedDict[BoundedProtocol, None]
    ending: set[BoundedProtocol]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _BoundedHeads()

    def connection_made(self, transport: Any) -> None:
        """Start the time for the first request, and make room if there are too many connections."""
        super().connection_made(transport)
        self.waiting[self] = None
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)
        if len(self.connections) - len(self.ending) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has waited longest without a request, else refuse this one."""
        del self.waiting[self]
        while self.waiting:
            oldest, _ = self.waiting.popitem(last=False)
            if oldest.transport.is_closing():
                continue
            # One with unread bytes waits again, as the newest, if they are no whole head.
            if not oldest.has_unread():
                self.ending.add(oldest)
                oldest.transport.abort()
                self.waiting[self] = None
                return
        self.ending.add(self)
        self._refuse(b"503 Service Unavailable\r\nretry-after: 1", BUSY)

    def has_unread(self) -> bool:
        """Return whether received bytes are not read yet.

        The loop accepts many connections before it reads.
        """
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
        """Return whether the connection has no request that is not answered yet."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Stop the time when a head is complete, and start it with the first part of the next request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._note_waiting()
        if not self.is_waiting():
            self._deadline.cancel()
        elif self._deadline.cancelled():  # the first part of the next request
            self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def on_response_complete(self) -> None:
        """Let the connection wait for its next request."""
        super().on_response_complete()
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Add the connection to those that wait, or remove it."""
        if self.is_waiting() and not self.transport.is_closing():
            self.waiting.setdefault(self)
        else:
            self.waiting.pop(self, None)

    def pause_writing(self) -> None:
        """Start the time for the client to take the reply."""
        super().pause_writing()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time: the client takes the reply."""
        super().resume_writing()
        self._deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        self._deadline.cancel()
        self.waiting.pop(self, None)
        self.ending.discard(self)
        super().connection_lost(exc)


def bounded_protocol(max_connections: int, seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol with limits.

    Args:
        max_connections: Open connections.
        seconds: Seconds for a client to send a request's head, and to take a reply; `BodyLimit` times the
            body.

    Returns:
        A subclass of BoundedProtocol.
    """
    members = {
        "max_connections": max_connections,
        "seconds": seconds,
        "waiting": OrderedDict(),
        "ending": set(),
    }
    return type("BoundedProtocol", (BoundedProtocol,), members)
