"""Web servers of tests: they answer from a thread."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """For subclasses with do_GET or do_POST. Logs nothing."""

    def body(self) -> bytes:
        """Of the request; to be read even where it does not matter, or the connection breaks."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        """Sends bytes as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if data is not content:
            self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Says nothing of clients that leave before they have their reply, as those of many tests do."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(handler: Any, port: int = 0) -> Iterator[str]:
    """Base URL of a server with this handler, which ends with the block; port 0: any that is free."""
    server = Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def replying(*replies: tuple[Any, ...]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Base URL and requests (path, headers) of a server with these replies; the last one stays."""
    requests: list[tuple[str, Any]] = []
    pending = list(replies)

    class Replying(Handler):
        def do_GET(self) -> None:
            self.body()
            requests.append((self.path, self.headers))
            self.reply(*(pending.pop(0) if len(pending) > 1 else pending[0]))

        do_POST = do_GET

    with serving(Replying) as url:
        yield url, requests
