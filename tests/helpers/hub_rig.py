"""A HuggingFace hub on loopback, as much of it as huggingface_hub asks for to download a repository."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from http_rig import Handler, serving
from huggingface_hub import constants


@dataclass
class Hub:
    """Repositories by "OWNER/NAME" ("datasets/OWNER/NAME"): commits, oldest first, each file -> bytes."""

    url: str = ""
    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)  # path of every file that was sent

    def add(self, name: str, folder: Path | None = None, **files: bytes) -> str:
        """A commit with these files; returns its id."""
        copied = {path.name: path.read_bytes() for path in (folder.iterdir() if folder else ())}
        commits = self.repositories.setdefault(name, [])
        commits.append(copied | {name.replace("__", "/"): content for name, content in files.items()})
        return self.commit(name, len(commits) - 1)

    def commit(self, name: str, number: int) -> str:
        return hashlib.sha1(f"{name} {number}".encode()).hexdigest()

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories[name]
        names = {self.commit(name, number): number for number in range(len(commits))}
        number = len(commits) - 1 if revision == "main" else names.get(revision)
        return None if number is None else (self.commit(name, number), commits[number])


class _Handler(Handler):
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
            return self.reply(404, {}, {"X-Error-Code": "RepoNotFound"})
        if name in self.hub.broken:
            return self.reply(500, {})
        if name in self.hub.gated:
            return self.reply(403, {}, {"X-Error-Code": "GatedRepo"})
        repository = self.hub.find(name, revision)
        if repository is None:
            return self.reply(404, {}, {"X-Error-Code": "RevisionNotFound"})
        commit, files = repository
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            return self.reply(
                200, {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings}
            )
        if what == "tree":
            sizes = [(path, len(data), hashlib.sha1(data).hexdigest()) for path, data in files.items()]
            tree = [{"type": "file", "path": path, "size": size, "oid": oid} for path, size, oid in sizes]
            return self.reply(200, tree)
        if file not in files:
            return self.reply(404, {}, {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.hub.downloads.append(f"{name}/{file}")
        etag = hashlib.sha1(files[file]).hexdigest()
        return self.reply(200, files[file], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with serving(handler) as hub.url:
        yield hub


@pytest.fixture(name="hub")
def running_hub(tmp_path, monkeypatch):
    with serve_hub() as running:
        use_hub(monkeypatch, running, tmp_path / "cache")
        yield running


def use_hub(monkeypatch, hub: Hub, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do for a process that starts with them."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
