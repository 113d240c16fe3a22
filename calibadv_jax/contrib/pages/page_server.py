"""The server of the trajectory page, and what guards a page against other pages."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from calibadv_jax.contrib.pages.site import INDEX, Site
from calibadv_jax.core.errors import UserError

ADDRESS = "127.0.0.1"
# Content type by the ending of an address.
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# A page runs its own scripts and styles only: text of a document or of the policy never runs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'"
)
# Other names are refused: a page elsewhere could make its own name point to this machine.
_NAMES = {"127.0.0.1", "localhost", "::1"}


def guard_headers(frame_ancestors: str = "'none'") -> dict[str, str]:
    """Return the headers that guard a page; every reply has them.

    Args:
        frame_ancestors: sources whose pages may show the page in a frame, as in a Content-Security-Policy.
    """
    return {
        "Content-Security-Policy": f"{POLICY}; frame-ancestors {frame_ancestors}",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def make_server(
    site: Site, port: int, frame_ancestors: str = "'none'", any_host: bool = False
) -> ThreadingHTTPServer:
    """Return a server on the loopback address, which does not serve yet.

    Args:
        site: what to serve.
        port: 0: a free port, which `server_port` tells.
        frame_ancestors: see `guard_headers`.
        any_host: whether to serve requests for other host names than those of this machine.

    Raises:
        UserError: the port is in use.
    """
    guards = guard_headers(frame_ancestors)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(with_content=True)

        def do_HEAD(self) -> None:
            self._send(with_content=False)

        def _send(self, with_content: bool) -> None:
            status, content, headers = self._reply()
            self.send_response(status)
            if status != HTTPStatus.NOT_MODIFIED:
                self.send_header("Content-Length", str(len(content)))
            for name, value in (guards | headers).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # a browser that has turned to another group
                self.end_headers()
                if with_content:
                    self.wfile.write(content)

        def _reply(self) -> tuple[HTTPStatus, bytes, dict[str, str]]:
            """Return status, content and the headers beside those that guard the page."""
            address = urlsplit(self.path).path.removeprefix("/") or "index.html"
            text_headers = {"Content-Type": TYPES["txt"]}
            if not any_host and not is_this_machine(self.headers.get("Host", "")):
                return HTTPStatus.FORBIDDEN, b"open this page as localhost\n", text_headers
            headers = {}
            try:
                if address == INDEX:
                    headers["ETag"] = site.index_tag()
                    if self.headers.get("If-None-Match") == headers["ETag"]:
                        return HTTPStatus.NOT_MODIFIED, b"", headers
                content = site.get(address)
            except UserError as error:
                return HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), text_headers
            if content is None:
                message = b"no such page; the trajectories are at /\n"
                return HTTPStatus.NOT_FOUND, message, text_headers
            _, _, ending = address.rpartition(".")
            headers["Content-Type"] = TYPES[ending]
            return HTTPStatus.OK, content, headers

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal shows the address alone."""

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; choose another one with --port") from error


def is_this_machine(host: str) -> bool:
    """Return whether a Host header names this machine, with or without a port."""
    try:
        return urlsplit(f"//{host}").hostname in _NAMES
    except ValueError:
        return False
