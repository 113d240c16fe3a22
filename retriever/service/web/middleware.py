"""Around every request, from the outside in: measured, named, asked for the token, its body limited."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

from starlette.responses import Response

from retriever.service.identity import HEADER
from retriever.service.metrics import Metrics
from retriever.service.web.contracts import error_reply
from retriever.service.web.replies import Left

ROUTES = {"/retrieve", "/access", "/health", "/metrics"}  # a label each; the others share one
OPEN = "/health"  # answers without a token, whoever reads it
READS = ("GET", "HEAD")  # methods whose bodies mean nothing, and are not read


class Measure:
    """ASGI middleware: counts requests by route and status, and times them."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in ROUTES else "other"
        begun, status = time.monotonic(), 500  # if the application fails before it answers

        async def note(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, note)
        finally:
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - begun)


class Identify:
    """ASGI middleware: every reply of ``/retrieve`` and ``/access`` says whose it is, also a refusal."""

    def __init__(self, app: Any, identity: str):
        self.app, self.header = app, (HEADER.lower().encode(), identity.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def say(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), self.header]}
            await send(message)

        has_documents = scope["type"] == "http" and scope["path"] in ("/retrieve", "/access")
        await self.app(scope, receive, say if has_documents else send)


class RequireToken:
    """ASGI middleware: without ``Authorization: Bearer <token>`` a request gets 401, its body unread."""

    def __init__(self, app: Any, token: str):
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] == "http" and scope["path"] == OPEN and scope["method"] in READS
        if scope["type"] == "http" and not is_open and not self._is_allowed(scope["headers"]):
            message = "send the header Authorization: Bearer <the service's token>"
            await error_reply(401, message, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, headers: list[tuple[bytes, bytes]]) -> bool:
        scheme, _, given = dict(headers).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.token)


class BodyLimit:
    """ASGI middleware: bounds what requests' bodies take of memory and time.

    A body beyond `max_body` bytes is answered with 413 and one that takes longer than `seconds` with 408;
    neither is read to its end. Where the bodies of all requests under way would pass `max_bodies` bytes,
    the one that is coming in gets 503.
    """

    def __init__(self, app: Any, max_body: int, max_bodies: int = 2**27, seconds: float = 30.0):
        self.app, self.max_body, self.max_bodies, self.seconds = app, max_body, max_bodies, seconds
        self._held = 0  # bytes, of all requests under way

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] in READS:
            await self.app(scope, _replay(b"", receive), send)
            return
        body = bytearray()  # grows in place, however small the parts
        try:
            refusal = await self._read(body, scope, receive)
            if refusal is None:
                await self.app(scope, _replay(bytes(body), receive), send)
            else:
                await refusal(scope, receive, send)
        except Left:
            return
        finally:
            self._held -= len(body)

    async def _read(self, body: bytearray, scope: Any, receive: Any) -> Response | None:
        """Reads the request's body; what to answer if it is not taken."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        is_number = declared.isdigit() and len(declared) < 20
        expected = int(declared) if is_number else self.max_body + 1
        more = True
        try:
            async with asyncio.timeout(self.seconds):
                while more and max(expected, len(body)) <= self.max_body and self._held <= self.max_bodies:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Left
                    part = message.get("body", b"")
                    body += part
                    self._held += len(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            text = f"the body took longer than {self.seconds:g} s; send it faster, or raise --request_seconds"
            return error_reply(408, text, {"Connection": "close"})
        if max(expected, len(body)) > self.max_body:
            text = f"the body is larger than {self.max_body} bytes; send fewer queries at once"
            return error_reply(413, text)
        if self._held > self.max_bodies:
            text = "the requests under way take all the memory they may; try again later"
            return error_reply(503, text, {"Retry-After": "1"})
        return None


def _replay(body: bytes, receive: Any) -> Any:
    """An ASGI receive that gives the whole body, and then what `receive` gives."""
    whole: bytes | None = body

    async def replay() -> Any:
        nonlocal whole
        if whole is None:
            return await receive()
        message = {"type": "http.request", "body": whole, "more_body": False}
        whole = None
        return message

    return replay
