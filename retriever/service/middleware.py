"""ASGI middleware: measures requests, asks for a token, and bounds the bodies of requests."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

from fastapi import Response

from retriever.service.identity import HEADER
from retriever.service.metrics import Metrics
from retriever.service.replies import ClientDisconnected, error_reply

# Routes that have a label each in the metrics; all others share one.
ROUTES = {"/retrieve", "/access", "/health", "/metrics"}
# Routes whose replies carry the identity of the index.
IDENTITY_ROUTES = ("/retrieve", "/access")
# The route that answers without a token.
OPEN_ROUTE = "/health"
# Methods whose bodies mean nothing and are not read.
BODYLESS = ("GET", "HEAD")


class Measure:
    """Counts and times requests by route and status, and adds the identity of the index to replies.

    Args:
        app: The application.
        metrics: Where they are counted.
        identity: Identity of the index, for the replies of ``/retrieve`` and ``/access``.
    """

    def __init__(self, app: Any, metrics: Metrics, identity: str):
        self.app = app
        self.metrics = metrics
        self.header = (HEADER.lower().encode(), identity.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        start = time.monotonic()
        status = 500  # if the application fails before it answers

        async def send_and_note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if route in IDENTITY_ROUTES:
                    headers = [*message.get("headers", ()), self.header]
                    message = message | {"headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)


class RequireToken:
    """Replies 401 to a request without ``Authorization: Bearer <token>``; its body is not read.

    Args:
        app: The application.
        token: The token; GET and HEAD of ``/health`` need none.
    """

    def __init__(self, app: Any, token: str):
        self.app = app
        self.token = token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._is_allowed(scope):
            await self.app(scope, receive, send)
            return
        message = "send the header Authorization: Bearer <the service's token>"
        reply = error_reply(401, message, {"WWW-Authenticate": "Bearer"})
        await reply(scope, receive, send)

    def _is_allowed(self, scope: Any) -> bool:
        if scope["type"] != "http":
            return True
        if scope["path"] == OPEN_ROUTE and scope["method"] in BODYLESS:
            return True
        authorization = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.token)


class BodyLimit:
    """Bounds memory and time of the bodies of requests.

    A body beyond `max_body` bytes gets 413, and one that takes longer than `seconds` 408; neither is read to
    its end. One that would bring the bodies of all requests above `max_bodies` bytes gets 503.

    Args:
        app: The application.
        max_body: Bytes of one body.
        max_bodies: Bytes of the bodies of all requests that are not answered yet.
        seconds: Seconds that a client may take to send a body.
    """

    def __init__(self, app: Any, max_body: int, max_bodies: int = 2**27, seconds: float = 30.0):
        self.app = app
        self.max_body = max_body
        self.max_bodies = max_bodies
        self.seconds = seconds
        # Bytes of the bodies of all requests that are not answered yet.
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] in BODYLESS:
            await self.app(scope, _replay(b"", receive), send)
            return
        body = bytearray()  # grows in place, however small the parts
        try:
            refusal = await self._read(body, scope, receive)
            if refusal is None:
                await self.app(scope, _replay(bytes(body), receive), send)
            else:
                await refusal(scope, receive, send)
        except ClientDisconnected:
            return
        finally:
            self._held -= len(body)

    async def _read(self, body: bytearray, scope: Any, receive: Any) -> Response | None:
        """Append the body of a request to `body`; return a reply if it is refused."""
        expected = self._expected_length(scope)
        has_more = True
        try:
            async with asyncio.timeout(self.seconds):
                while has_more and not self._is_too_large(body, expected) and self._held <= self.max_bodies:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            text = f"the body took longer than {self.seconds:g} s; send it faster, or raise --request_seconds"
            return error_reply(408, text, {"Connection": "close"})
        if self._is_too_large(body, expected):
            text = f"the body is larger than {self.max_body} bytes; send fewer queries at once"
            return error_reply(413, text)
        if self._held > self.max_bodies:
            text = "the requests under way take all the memory they may; try again later"
            return error_reply(503, text, {"Retry-After": "1"})
        return None

    def _expected_length(self, scope: Any) -> int:
        """Return the declared length of a body, 0 if there is none; a number too large for an invalid one."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        is_number = declared.isdigit() and len(declared) < 20
        return int(declared) if is_number else self.max_body + 1

    def _is_too_large(self, body: bytearray, expected: int) -> bool:
        return max(expected, len(body)) > self.max_body


def _replay(body: bytes, receive: Any) -> Any:
    """Return an ASGI receive that gives a whole body, then the messages of `receive`."""
    is_given = False

    async def replay() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
