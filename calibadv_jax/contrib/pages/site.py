"""The trajectory page of a run: its record, the index of all trajectories, its files, and their server."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from calibadv_jax.config.kept import newest_start
from calibadv_jax.contrib.pages.transcript import Pieces, RecordRow, transcript
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.record.reader import opening_and_actions, read_columns, read_metadata
from calibadv_jax.record.schema import kept_steps, short_name

# Bits of a trajectory's flags; static/records.js names the same bits.
FAILED, FORMAT_INVALID, INVALID, UNFINISHED, WRONG, GOOD_SEARCH, SOFTENED, REPEATED = (
    1 << bit for bit in range(8)
)
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
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
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NAMES = {"127.0.0.1", "localhost", "::1"}  # a page elsewhere could make its own name point to this machine


class RunFiles:
    """Kept rollouts of one run, which may still be writing them: the steps from `first` to `last`.

    Raises UserError if the folder keeps no such steps; in methods, which read the newest files, if one is
    damaged.
    """

    def __init__(self, folder: Path, first: int = 0, last: int | None = None):
        self.folder, self.first, self.last = folder, first, last
        self._table = lru_cache(maxsize=_TABLES_HELD)(lambda path, *version: read_columns(path))
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder of a run (run.dir)")
        steps = list(kept_steps(folder))
        if not steps and self.config().get("log", {}).get("rollouts", "none") == "none":
            raise UserError(
                f"{folder}: no rollouts/step_N.parquet there; give the folder of a run with log.rollouts"
            )
        if steps and not self.paths():
            raise UserError(
                f"--steps: {folder} keeps steps {steps[0]} to {steps[-1]}, and none of the steps asked for"
            )

    def paths(self) -> dict[int, Path]:
        return {
            step: path
            for step, path in kept_steps(self.folder).items()
            if self.first <= step and (self.last is None or step <= self.last)
        }

    def config(self) -> dict[str, Any]:
        """Return the config of the newest kept step; before the first step, of the newest start, if any."""
        if self.paths():
            config: dict[str, Any] = json.loads(self.metadata()["config"])
            return config
        start = newest_start(self.folder)
        return start.config if start else {}

    def versions(self) -> dict[int, tuple[Path, int, int]]:
        """Return the file of each step, with what tells one version of it from the next."""
        versions = {}
        for step, path in self.paths().items():
            with suppress(FileNotFoundError):  # removed meanwhile (log.rollouts_keep)
                state = path.stat()
                versions[step] = path, state.st_mtime_ns, state.st_size
        return versions

    def group(self, step: int, group: int) -> list[RecordRow]:
        """Return the trajectories of a group with all columns; empty where there is no such group."""
        version = self.versions().get(step)
        if version is None:
            return []
        table: pa.Table = self._table(*version)
        return table.filter(pc.field("group") == group).to_pylist()

    def metadata(self) -> dict[str, str]:
        return read_metadata(list(self.paths().values())[-1])


def flags_of(row: RecordRow) -> int:
    """Return the properties of a trajectory as bits.

    Wrong: finished, and its answer equals no golden answer (no exact match). A good search found silver
    documents that count (correctness above 0), or a supporting passage.
    """
    if row["error"] is not None:
        return FAILED
    turns, supporting = row["turns"], set(row["supporting_ids"])
    kinds = {turn["kind"] for turn in turns}
    conditions = {
        FORMAT_INVALID: not row["format_valid"],
        INVALID: "invalid" in kinds,
        UNFINISHED: "unfinished" in kinds,
        WRONG: dict(row["metrics"])["em"] < 1,
        GOOD_SEARCH: any(
            turn["correctness"] or supporting & {document["id"] for document in turn["documents"]}
            for turn in turns
        ),
        SOFTENED: any(turn["softened"] for turn in turns),
        REPEATED: any(turn["repeated"] for turn in turns),
    }
    return sum(bit for bit, holds in conditions.items() if holds)


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


def _lengths(path: Path) -> list[int]:
    """Return the sampled tokens of each trajectory of a step."""
    turns = read_columns(path, ["turns.list.element.token_ids.list.element"])["turns"].combine_chunks()
    counts = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids"))
    sums = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))])  # int64
    ends = np.cumsum(pc.list_value_length(turns).to_numpy(zero_copy_only=False))
    lengths: list[int] = np.diff(sums[np.concatenate([[0], ends])]).tolist()
    return lengths


class Site:
    """The files of the trajectory page, by their address: the same for the server and for a folder.

    Raises UserError if the run's tokenizer is missing; in methods, if a step cannot be read.
    """

    def __init__(self, files: RunFiles):
        self.files = files
        self._steps: dict[tuple[Path, int, int], dict[str, Any]] = {}
        if files.paths():
            self._pieces.text([])  # so that a missing tokenizer is named now

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.files.folder / self.files.metadata()["tokenizer"])

    def steps(self) -> list[dict[str, Any]]:
        """Return `tabulate` of every step; a step's file is read once, and again where it has changed."""
        self._steps = {
            version: self._steps.get(version) or self._read(step, version[0])
            for step, version in self.files.versions().items()
        }
        return list(self._steps.values())

    def _read(self, step: int, path: Path) -> dict[str, Any]:
        return {"step": step} | tabulate(read_columns(path, _COLUMNS).to_pylist(), _lengths(path))

    def index_tag(self) -> str:
        """Return the HTTP entity tag of the index, which changes with the steps; no file is read."""
        return f'"{hashlib.sha256(repr(self.files.versions()).encode()).hexdigest()[:32]}"'

    def static(self) -> dict[str, bytes]:
        """Return address -> content of the files that do not depend on the run."""
        folder = resources.files("calibadv_jax.contrib.pages") / "static"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def get(self, address: str) -> bytes | None:
        """Return the content of an address such as "data/index.json"; None where there is nothing."""
        if address == INDEX:
            return self._index()
        if group := _GROUP.fullmatch(address):
            rows = self.files.group(int(group[1]), int(group[2]))
            if not rows:
                return None
            metadata = self.files.metadata()
            settings = json.loads(metadata["advantage"])  # that section of the run's config
            return _json(transcript(rows, self._pieces, settings, *opening_and_actions(metadata)))
        return self.static().get(address)

    def _index(self) -> bytes:
        steps, config, name = self.steps(), self.files.config(), short_name(self.files.folder)
        planned, last = int(config["learner"]["steps"]), self.files.last
        planned = planned if last is None else min(planned, last)
        return _json({"name": name, "advantage": config["advantage"], "planned": planned, "steps": steps})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def make_server(site: Site, port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback address that answers GET and HEAD; UserError if the port is taken.

    `port`: 0 takes a free one; see `server_port`.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not is_this_machine(self.headers.get("Host", "")):
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"open this page as localhost\n")
                return
            address = urlsplit(self.path).path.removeprefix("/") or "index.html"
            try:
                tag = site.index_tag() if address == INDEX else ""
                if tag and self.headers.get("If-None-Match") == tag:
                    self._answer(HTTPStatus.NOT_MODIFIED, tag=tag)
                    return
                content = site.get(address)
            except UserError as error:
                text = f"{error}\n".encode()
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text)
                return
            if content is None:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such page; the trajectories are at /\n")
            else:
                kind = TYPES.get(address.rpartition(".")[2], "text/plain")
                self._answer(HTTPStatus.OK, kind, content, tag)

        do_HEAD = do_GET

        def _answer(self, status: HTTPStatus, kind: str = "", content: bytes = b"", tag: str = "") -> None:
            self.send_response(status)
            about = {"Content-Type": kind, "Content-Length": str(len(content))} if kind else {}
            for name, value in (HEADERS | about | ({"ETag": tag} if tag else {})).items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # a browser that has turned to another group
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the terminal shows the address alone."""

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise UserError(f"port {port}: {error.strerror}; choose another one with --port") from error


def is_this_machine(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _NAMES
    except ValueError:
        return False


def write_site(site: Site, folder: Path) -> int:
    """Write all files of the page; return their number. Raises UserError if the folder holds other files."""
    is_page = folder.is_dir() and (not any(folder.iterdir()) or (folder / INDEX).is_file())
    if folder.exists() and not is_page:
        raise UserError(f"{folder}: exists, and holds no such page; give --output a new or empty folder")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for old in (folder / "data").glob("group_*.json"):
        old.unlink()
    groups = ((step["step"], group) for step in site.steps() for group in step["groups"]["group"])
    addresses = [*site.static(), INDEX, *(f"data/group_{step}_{group}.json" for step, group in groups)]
    for address in addresses:
        content = site.get(address)
        assert content is not None, address
        (folder / address).write_bytes(content)
    return len(addresses)
