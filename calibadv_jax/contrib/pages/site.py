"""The trajectory page: files of a run, the index, and the server."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from calibadv_jax.contrib.pages.transcript import Pieces, transcript
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.record.reader import opening_and_actions, read_columns, read_metadata
from calibadv_jax.record.schema import kept_steps, short_name

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
INDEX = "data/index.json"

_GROUP = re.compile(r"data/group_(\d{1,9})_(\d{1,9})\.json")


class Site:
    """What the page consists of.

    Args:
        files: of the run, which may still be running.

    Raises:
        UserError: the run's tokenizer is missing, or a step cannot be read.
    """

    def __init__(self, files: RunFiles):
        self.files, self.index = files, RunIndex(files)
        metadata = files.metadata()
        self.settings: dict[str, Any] = json.loads(metadata["advantage"])  # that section of the run's config
        self._protocol = opening_and_actions(metadata)
        self._pieces = Pieces(files.folder / metadata["tokenizer"])

    def static(self) -> dict[str, bytes]:
        """Address -> content of the files that do not depend on the run."""
        folder = resources.files("calibadv_jax.contrib.pages") / "static"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def get(self, address: str) -> bytes | None:
        """Content of an address such as "index.html", "data/index.json"; None where there is nothing.

        Raises:
            UserError: a step's file cannot be read.
        """
        if address == INDEX:
            return self._index()
        group = _GROUP.fullmatch(address)
        if group:
            rows = self.files.group(int(group[1]), int(group[2]))
            return _json(transcript(rows, self._pieces, self.settings, *self._protocol)) if rows else None
        return self.static().get(address)

    def everything(self) -> Iterator[tuple[str, bytes]]:
        """Address and content of every file."""
        yield from self.static().items()
        yield INDEX, self._index()
        for step in self.index.steps():
            for group in step["groups"]["group"]:
                address = f"data/group_{step['step']}_{group}.json"
                content = self.get(address)
                assert content is not None, address
                yield address, content

    def _index(self) -> bytes:
        name = short_name(self.files.folder)
        steps = self.index.steps()
        # Of a part of the steps (--steps) the newest one is not the run's.
        planned = self.files.planned_steps() if self.files.last is None else steps[-1]["step"]
        return _json({"name": name, "advantage": self.settings, "planned": planned, "steps": steps})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


Row = dict[str, Any]  # a trajectory, by the columns of record.schema

_TABLES_HELD = 2  # steps that stay in memory


class RunFiles:
    """Kept rollouts of one run, which may still be writing them.

    Args:
        folder: `run.dir`.
        first, last: steps outside are left out.

    Raises:
        UserError: no such folder, or it keeps no such steps.
    """

    def __init__(self, folder: Path, first: int = 0, last: int | None = None):
        self.folder, self.first, self.last = folder, first, last
        self._table = lru_cache(maxsize=_TABLES_HELD)(_table)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the folder of a run (run.dir)")
        if not kept_steps(folder):
            raise UserError(
                f"{folder}: no rollouts/step_N.parquet there; give the folder of a run with log.rollouts"
            )
        if not self.paths():
            steps = list(kept_steps(folder))
            raise UserError(
                f"--steps: {folder} keeps steps {steps[0]} to {steps[-1]}, and none of the steps asked for"
            )

    def paths(self) -> dict[int, Path]:
        """Step -> its file, ascending; files that appear later are found by later calls."""
        return {
            step: path
            for step, path in kept_steps(self.folder).items()
            if self.first <= step and (self.last is None or step <= self.last)
        }

    def rows(self, path: Path, columns: Sequence[str]) -> list[Row]:
        """Trajectories of a step with some of their columns; "turns.list.element.kind" names a nested one.

        Raises:
            UserError: the file is damaged, or of another version.
        """
        return read_columns(path, columns).to_pylist()

    def lengths(self, path: Path) -> list[int]:
        """Sampled tokens of each trajectory of a step, in the order of `rows`.

        Raises:
            UserError: as `rows`.
        """
        turns = read_columns(path, ["turns.list.element.token_ids.list.element"])["turns"].combine_chunks()
        counts = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids"))
        sums = np.concatenate([[0], np.cumsum(counts.to_numpy(zero_copy_only=False))])  # int64
        ends = np.cumsum(pc.list_value_length(turns).to_numpy(zero_copy_only=False))
        lengths: list[int] = np.diff(sums[np.concatenate([[0], ends])]).tolist()
        return lengths

    def planned_steps(self) -> int:
        """Steps that the run is configured to train, as the newest kept step says."""
        return int(json.loads(self.metadata()["config"])["learner"]["steps"])

    def group(self, step: int, group: int) -> list[Row]:
        """The trajectories of a group with all their columns; empty where there is no such group.

        Raises:
            UserError: as `rows`.
        """
        path = self.paths().get(step)
        if path is None:
            return []
        state = path.stat()
        table = self._table(path, state.st_mtime_ns, state.st_size)
        return table.filter(pc.field("group") == group).to_pylist()

    def metadata(self) -> dict[str, str]:
        """See `record.reader.read_metadata`; of the newest step."""
        return read_metadata(list(self.paths().values())[-1])


def _table(path: Path, *_: int) -> pa.Table:
    """All columns; the other arguments tell one version of a file from the next."""
    return read_columns(path)


# Bits of a trajectory's flags; static/records.js names the same bits.
FAILED, FORMAT_INVALID, INVALID, UNFINISHED, WRONG, GOOD_SEARCH, SOFTENED, REPEATED = (
    1 << bit for bit in range(8)
)

_TURN = "turns.list.element."
_COLUMNS = (
    *("group", "index", "question", "data_source", "golden_answers", "supporting_ids", "error", "answer"),
    *("answer_score", "format_valid", "metrics", "advantage_raw", "silver"),
    *(_TURN + name for name in ("kind", "query", "correctness", "softened", "repeated")),
    _TURN + "documents.list.element.id",
)


def flags_of(row: Row) -> int:
    """What a trajectory is, as bits.

    Wrong: finished, and its answer equals no golden answer (no exact match). A good search found silver
    documents that count (correctness above 0), or a document that is known to support the answer.
    """
    if row["error"] is not None:
        return FAILED
    turns, supporting = row["turns"], set(row["supporting_ids"])
    metrics: dict[str, float] = dict(row["metrics"])
    kinds = {turn["kind"] for turn in turns}
    good = any(
        turn["correctness"] or supporting & {document["id"] for document in turn["documents"]}
        for turn in turns
    )
    conditions = {
        FORMAT_INVALID: not row["format_valid"],
        INVALID: "invalid" in kinds,
        UNFINISHED: "unfinished" in kinds,
        WRONG: metrics["em"] < 1,
        GOOD_SEARCH: good,
        SOFTENED: any(turn["softened"] for turn in turns),
        REPEATED: any(turn["repeated"] for turn in turns),
    }
    return sum(bit for bit, holds in conditions.items() if holds)


class RunIndex:
    """The index of a run; each step's file is read once, and again where it has changed."""

    def __init__(self, files: RunFiles):
        self.files = files
        self._steps: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def steps(self) -> list[dict[str, Any]]:
        """One table a step, in lists by column: `groups` of the step, `rows` (trajectories) of its groups.

        A row's `group` is a place in `groups`; `queries` are what its actions asked for, a line each.

        Raises:
            UserError: a file cannot be read.
        """
        return [self._step(step, path) for step, path in self.files.paths().items()]

    def _step(self, step: int, path: Path) -> dict[str, Any]:
        state = path.stat()
        version = (state.st_mtime_ns, state.st_size)
        kept = self._steps.get(path)
        if kept is None or kept[0] != version:
            table = tabulate(self.files.rows(path, _COLUMNS), self.files.lengths(path))
            kept = version, {"step": step, **table}
            self._steps[path] = kept
        return kept[1]


def tabulate(rows: Sequence[Row], lengths: Sequence[int]) -> dict[str, Any]:
    """The trajectories of a step, in the order of their groups, as columns; `lengths` in sampled tokens."""
    groups: dict[str, list[Any]] = {name: [] for name in ("group", "question", "source", "golden", "silver")}
    names = ("group", "index", "score", "flags", "advantage", "searches", "length", "answer", "queries")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for row, length in zip(rows, lengths, strict=True):
        if not groups["group"] or groups["group"][-1] != row["group"]:
            groups["group"].append(row["group"])
            groups["question"].append(row["question"])
            groups["source"].append(row["data_source"])
            groups["golden"].append(row["golden_answers"])
            groups["silver"].append(len(row["silver"]))
        queries = [turn["query"] for turn in row["turns"] if turn["kind"] not in NO_ACTIONS]
        raw = row["advantage_raw"]
        columns["group"].append(len(groups["group"]) - 1)
        columns["index"].append(row["index"])
        columns["score"].append(round(row["answer_score"], 4))
        columns["flags"].append(flags_of(row))
        columns["advantage"].append(None if raw is None else round(raw, 4))
        columns["searches"].append(len(queries))
        columns["length"].append(length)
        columns["answer"].append(row["answer"])
        columns["queries"].append("\n".join(queries))
    return {"groups": groups, "rows": columns}


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
