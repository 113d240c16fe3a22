"""HTTP connections with limits: on their number, and on the time in which a request's head must come."""

from __future__ import annotations

import asyncio
import json
import select
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CLIENT_SECONDS = 30.0  # time in which a client must send a request's head, and again its body
_BUSY_TEXT = "all connections are in use; try again later"
_BUSY_BODY = json.dumps({"error": {"message": _BUSY_TEXT, "type": "server_error"}}).encode()
# Reply to a connection beyond the limit while all others have a request.
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits, which `bounded_protocol` sets.

    Beyond `max_connections` a new connection replaces the one that has waited longest without a request: idle
    connections stop nobody. If all have a request, the new one gets 503.

    Attributes:
        max_connections: open connections.
        waiting: connections without a request, in the order in which they began to wait.
        ending: connections that were closed to make room, until the loop has removed them.
    """

    max_connections: int
    waiting: OrderedDict[BoundedProtocol, None]
    ending: set[BoundedProtocol]

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first request, and make room if there are too many connections."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)
        if len(self.connections) - len(self.ending) > self.max_connections:
            self._make_room()
        else:
            self.waiting[self] = None

    def _make_room(self) -> None:
        """Close the connection that has waited longest without a request, else refuse this one."""
        while self.waiting:
            oldest, _ = self.waiting.popitem(last=False)
            # One with unread bytes waits again, as the newest, if they are no whole head.
            if not oldest.transport.is_closing() and not oldest.has_unread():
                self.ending.add(oldest)
                oldest.transport.abort()
                self.waiting[self] = None
                return
        self.ending.add(self)
        self.transport.write(BUSY)
        self.transport.close()

    def has_unread(self) -> bool:
        """Return whether received bytes are not read yet: the loop accepts many connections at once."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def data_received(self, data: bytes) -> None:
        """Stop the time limit when a request's head is complete; start it with the next request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._note_waiting()
        if self._has_request():
            self._deadline.cancel()
        elif self._deadline.cancelled():  # the first part of the next request
            self._deadline = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        """Let the connection wait for its next request."""
        super().on_response_complete()
        self._note_waiting()

    def _has_request(self) -> bool:
        """Return whether the connection has a request that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _note_waiting(self) -> None:
        """Add the connection to those that wait, or remove it."""
        if self._has_request() or self.transport.is_closing():
            self.waiting.pop(self, None)
        else:
            self.waiting.setdefault(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._deadline.cancel()
        self.waiting.pop(self, None)
        self.ending.discard(self)
        super().connection_lost(exc)


def bounded_protocol(max_connections: int) -> type[asyncio.Protocol]:
    """Return the protocol with a limit on open connections."""
    members = {"max_connections": max_connections, "waiting": OrderedDict(), "ending": set()}
    return type("BoundedProtocol", (BoundedProtocol,), members)
