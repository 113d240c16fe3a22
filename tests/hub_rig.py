"""A HuggingFace hub on loopback, as much of it as huggingface_hub asks for to download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants


@dataclass
class Hub:
    """Repositories by "OWNER/NAME" ("datasets/OWNER/NAME"): commits, oldest first, each file -> bytes."""

    url: str = ""
    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)  # path of every file that was sent

    def add(self, name: str, folder: Path | None = None, **files: bytes) -> str:
        """A commit with these files; returns its id."""
        found = {path.name: path.read_bytes() for path in (folder.iterdir() if folder else ())}
        commits = self.repositories.setdefault(name, [])
        commits.append(found | {name.replace("__", "/"): content for name, content in files.items()})
        return self.commit(name, len(commits) - 1)

    def commit(self, name: str, number: int) -> str:
        return hashlib.sha1(f"{name} {number}".encode()).hexdigest()

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories[name]
        names = {self.commit(name, number): number for number in range(len(commits))}
        number = len(commits) - 1 if revision == "main" else names.get(revision)
        return None if number is None else (self.commit(name, number), commits[number])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api":
            kind, owner, name, what, revision = (*parts[1:4], parts[4], parts[5])
            self._answer(kind, f"{owner}/{name}", what, revision, "")
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            owner, name, _, revision, *file = parts[kind == "datasets" :]
            self._answer(kind, f"{owner}/{name}", "resolve", revision, "/".join(file))

    do_HEAD = do_GET

    def _answer(self, kind: str, name: str, what: str, revision: str, file: str) -> None:
        name = f"datasets/{name}" if kind == "datasets" else name
        if name not in self.hub.repositories:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if name in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        found = self.hub.find(name, revision)
        if found is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if what == "revision":
            siblings = [{"rfilename": one} for one in files]
            return self._json({"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings})
        if what == "tree":
            return self._json(
                [
                    {
                        "type": "file",
                        "path": one,
                        "size": len(data),
                        "oid": hashlib.sha1(data).hexdigest(),
                    }
                    for one, data in files.items()
                ]
            )
        if file not in files:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.hub.downloads.append(f"{name}/{file}")
        etag = hashlib.sha1(files[file]).hexdigest()
        return self._send(200, files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch, hub: Hub, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do for a process that starts with them."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
