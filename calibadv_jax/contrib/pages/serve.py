"""Serves the trajectory page to browsers of this machine, or writes it into a folder."""

from __future__ import annotations

import errno
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from calibadv_jax.contrib.pages.site import TYPES, Site
from calibadv_jax.core.errors import UserError

ADDRESS = "127.0.0.1"

# The page's own scripts and styles, and nothing else: what a document or the policy wrote never runs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NAMES = {"127.0.0.1", "localhost", "::1"}  # a page elsewhere could make its own name point to this machine


def make_server(site: Site, port: int) -> ThreadingHTTPServer:
    """A server on the loopback address that answers GET and HEAD.

    Args:
        port: 0 takes a free one; see `server_port`.

    Raises:
        UserError: the port is taken, or not to be had.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not _is_this_machine(self.headers.get("Host", "")):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"open this page as localhost\n")
                return
            address = urlsplit(self.path).path.removeprefix("/") or "index.html"
            try:
                content = site.get(address)
            except UserError as error:
                self._answer(
                    HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode()
                )
                return
            if content is None:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such page; the trajectories are at /\n")
                return
            self._answer(HTTPStatus.OK, TYPES.get(address.rpartition(".")[2], "text/plain"), content)

        do_HEAD = do_GET

        def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            self.send_response(status)
            for name, value in {
                **_HEADERS,
                "Content-Type": kind,
                "Content-Length": str(len(content)),
            }.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # a browser that has turned to another group
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal shows the address alone."""

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UserError(f"port {port}: {error.strerror}; choose another one with --port") from error


def _is_this_machine(host: str) -> bool:
    """Whether the request's header Host names the loopback address."""
    try:
        return urlsplit(f"//{host}").hostname in _NAMES
    except ValueError:
        return False


def write_site(site: Site, folder: Path) -> int:
    """Writes all files of the page; returns their number.

    Raises:
        UserError: the folder holds something else already.
    """
    if folder.exists() and not (folder.is_dir() and _is_ours(folder)):
        raise UserError(f"{folder}: exists, and holds no such page; give --output a new or empty folder")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for old in (folder / "data").glob("group_*.json"):
        old.unlink()
    addresses = []
    for address, content in site.everything():
        (folder / address).write_bytes(content)
        addresses.append(address)
    return len(addresses)


def _is_ours(folder: Path) -> bool:
    """Whether it is empty, or was written by `write_site` before."""
    return not any(folder.iterdir()) or (folder / "data" / "index.json").is_file()
