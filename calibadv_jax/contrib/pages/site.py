"""The trajectory page of a run: its record, the index of all trajectories, its files, and their server."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow.compute as pc

from calibadv_jax.config import AdvantageConfig
from calibadv_jax.config.kept import newest_start
from calibadv_jax.contrib.pages.transcript import Pieces, RecordRow, transcript
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.rollout_store.reader import opening_and_actions, read_columns, read_metadata
from calibadv_jax.rollout_store.schema import kept_steps, short_name

# Of a trajectory, bit by bit, as in static/records.js.
FLAGS = ("failed", "formatInvalid", "invalid", "unfinished", "wrong", "goodSearch", "softened", "repeated")
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
STATIC = Path(__file__).with_name("static")
INDEX = "data/index.json"
ADDRESS = "127.0.0.1"
# The page's own scripts and styles only: text of a document or of the policy never runs.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'"
)
_TABLES_HELD = 2  # steps that stay in memory
_TURN = "turns.list.element."
_COLUMNS = (
    *("group", "index", "question", "data_source", "golden_answers", "supporting_ids", "error", "answer"),
    *("answer_score", "format_valid", "metrics", "advantage_raw", "silver"),
    *(_TURN + name for name in ("kind", "query", "correctness", "softened", "repeated")),
    _TURN + "documents.list.element.id",
)
_GROUP = re.compile(r"data/group_(\d{1,9})_(\d{1,9})\.json")
_NAMES = {"127.0.0.1", "localhost", "::1"}  # a page elsewhere could make its own name point to this machine


class Site:
    """The trajectory page of a run, which may go on: its kept steps, by address.

    Raises UserError if the folder keeps no steps, or the run's tokenizer is missing; in methods, which
    read the newest files, if one is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._table = lru_cache(maxsize=_TABLES_HELD)(lambda path, *version: read_columns(path))
        self._steps: dict[tuple[int, Path, int, int], dict[str, Any]] = {}
        if kept_steps(folder):
            self._pieces.text([])  # so that a missing tokenizer is named now
        elif self._config().get("log", {}).get("rollouts", "none") == "none":
            advice = "give the folder of a run with log.rollouts"
            raise UserError(f"{folder}: no rollouts/step_N.parquet there; {advice}")

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.folder / self._metadata()["tokenizer"])

    def _metadata(self) -> dict[str, str]:
        return read_metadata(list(kept_steps(self.folder).values())[-1])

    def _config(self) -> dict[str, Any]:
        """Return the config of the newest kept step; before the first step, of the newest start, if any."""
        if kept_steps(self.folder):
            config: dict[str, Any] = json.loads(self._metadata()["config"])
            return config
        start = newest_start(self.folder)
        return start.config if start else {}

    def _versions(self) -> dict[int, tuple[Path, int, int]]:
        """Return each step's file with its time and size, which tell one version of it from the next."""
        versions = {}
        for step, path in kept_steps(self.folder).items():
            with suppress(FileNotFoundError):  # removed meanwhile (log.rollouts_keep)
                state = path.stat()
                versions[step] = path, state.st_mtime_ns, state.st_size
        return versions

    def steps(self) -> list[dict[str, Any]]:
        """Return `tabulate` of every step; a step's file is read once, and again where it has changed."""
        versions = [(step, *version) for step, version in self._versions().items()]
        self._steps = {version: self._steps.get(version) or _read_step(*version) for version in versions}
        return list(self._steps.values())

    def index_tag(self) -> str:
        """Return the HTTP entity tag of the index, which changes with the steps; no file is read."""
        return f'"{hashlib.sha256(repr(self._versions()).encode()).hexdigest()[:32]}"'

    def get(self, address: str) -> bytes | None:
        """Return the content of an address such as "data/index.json"; None where there is nothing."""
        if address == INDEX:
            steps, config = self.steps(), self._config()
            about = {"name": short_name(self.folder), "advantage": config["advantage"]}
            return _json(about | {"planned": int(config["learner"]["steps"]), "steps": steps})
        if match := _GROUP.fullmatch(address):
            return self._group(int(match[1]), int(match[2]))
        is_static = address in {path.name for path in STATIC.iterdir()}
        return (STATIC / address).read_bytes() if is_static else None

    def _group(self, step: int, group: int) -> bytes | None:
        version = self._versions().get(step)
        rows = self._table(*version).filter(pc.field("group") == group).to_pylist() if version else []
        if not rows:
            return None
        metadata = self._metadata()
        config = AdvantageConfig()
        vars(config).update(json.loads(metadata["advantage"]))  # unchecked: older runs had other keys, values
        return _json(transcript(rows, self._pieces, config, *opening_and_actions(metadata)))


def flags_of(row: RecordRow) -> int:
    """Return the FLAGS of a trajectory as bits.

    Wrong: finished, and its answer equals no golden answer (no exact match). A good search found silver
    documents that count (correctness above 0), or a supporting passage.
    """
    if row["error"] is not None:
        return 1 << FLAGS.index("failed")
    turns, supporting = row["turns"], set(row["supporting_ids"])
    supported = [supporting & {document["id"] for document in turn["documents"]} for turn in turns]
    kinds = {turn["kind"] for turn in turns}
    flags = {
        "formatInvalid": not row["format_valid"],
        "invalid": "invalid" in kinds,
        "unfinished": "unfinished" in kinds,
        "wrong": dict(row["metrics"])["em"] < 1,
        "goodSearch": any(supported) or any(turn["correctness"] for turn in turns),
        "softened": any(turn["softened"] for turn in turns),
        "repeated": any(turn["repeated"] for turn in turns),
    }
    return sum(1 << FLAGS.index(name) for name, holds in flags.items() if holds)


def _read_step(step: int, path: Path, *_: int) -> dict[str, Any]:
    turns = read_columns(path, [_TURN + "token_ids.list.element"])["turns"].combine_chunks()
    counts = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids"))
    lengths = np.bincount(pc.list_parent_indices(turns), counts, len(turns)).astype(np.int64)
    return {"step": step} | tabulate(read_columns(path, _COLUMNS).to_pylist(), lengths.tolist())


def tabulate(rows: Sequence[RecordRow], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the trajectories of a step, in the order of their groups, as columns.

    A row's `group` is a place in `groups`; `length`: its sampled tokens; `queries`: a line each.
    """
    groups = {row["group"]: row for row in reversed(rows)}  # the first row of each
    places = {group: place for place, group in enumerate(sorted(groups))}
    queries = [[turn["query"] for turn in row["turns"] if turn["kind"] not in NO_ACTIONS] for row in rows]
    raw = [row["advantage_raw"] for row in rows]
    firsts = [groups[group] for group in places]
    return {
        "groups": {
            "group": list(places),
            "question": [row["question"] for row in firsts],
            "source": [row["data_source"] for row in firsts],
            "golden": [row["golden_answers"] for row in firsts],
            "silver": [len(row["silver"]) for row in firsts],
        },
        "rows": {
            "group": [places[row["group"]] for row in rows],
            "index": [row["index"] for row in rows],
            "score": [round(row["answer_score"], 4) for row in rows],
            "flags": list(map(flags_of, rows)),
            "advantage": [None if value is None else round(value, 4) for value in raw],
            "searches": list(map(len, queries)),
            "length": list(lengths),
            "answer": [row["answer"] for row in rows],
            "queries": list(map("\n".join, queries)),
        },
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def guard_headers(frame_ancestors: str = "'none'") -> dict[str, str]:
    """Return the headers of every reply that guard a page."""
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
    """Return a server on the loopback address; `port` 0: a free one (`server_port`). UserError if taken."""
    guards = guard_headers(frame_ancestors)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, content, headers = self._reply()
            self.send_response(status)
            if status != HTTPStatus.NOT_MODIFIED:
                self.send_header("Content-Length", str(len(content)))
            for name, value in (guards | headers).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # a browser that has turned to another group
                self.end_headers()
                self.wfile.write(content)

        def _reply(self) -> tuple[HTTPStatus, bytes, dict[str, str]]:
            address = urlsplit(self.path).path.removeprefix("/") or "index.html"
            text = {"Content-Type": TYPES["txt"]}
            if not any_host and not is_this_machine(self.headers.get("Host", "")):
                return HTTPStatus.FORBIDDEN, b"open this page as localhost\n", text
            try:
                tag = {"ETag": site.index_tag()} if address == INDEX else {}
                if tag and self.headers.get("If-None-Match") == tag["ETag"]:
                    return HTTPStatus.NOT_MODIFIED, b"", tag
                content = site.get(address)
            except UserError as error:
                return HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), text
            if content is None:
                return HTTPStatus.NOT_FOUND, b"no such page; the trajectories are at /\n", text
            return HTTPStatus.OK, content, tag | {"Content-Type": TYPES[address.rpartition(".")[2]]}

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal shows the address alone."""

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; choose another one with --port") from error


def is_this_machine(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _NAMES
    except ValueError:
        return False
