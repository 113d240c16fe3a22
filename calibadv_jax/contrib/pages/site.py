"""The trajectory page of a run: its record, the index of all trajectories, and its files, by address."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from calibadv_jax.config import AdvantageConfig
from calibadv_jax.config.kept import newest_start
from calibadv_jax.contrib.pages.evaluations import Evaluations
from calibadv_jax.contrib.pages.static_page import render_groups
from calibadv_jax.contrib.pages.transcript import Pieces, RecordRow, transcript
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.rollout_store.reader import read_columns, read_metadata, shared_fields
from calibadv_jax.rollout_store.schema import kept_steps, run_name

# Flags of a trajectory, each a bit: the first one has the value 1. static/records.js has the same order.
FLAGS = (
    "failed",
    "formatInvalid",
    "invalid",
    "unfinished",
    "wrong",
    "goodSearch",
    "softened",
    "repeated",
)
STATIC = Path(__file__).with_name("static")
INDEX = "data/index.json"
EVALUATIONS = "data/evaluations.json"
_TABLES_HELD = 2  # steps whose tables stay in memory
_TURN = "turns.list.element."
# Columns that the index reads.
_COLUMNS = (
    "group",
    "index",
    "question",
    "data_source",
    "golden_answers",
    "supporting_ids",
    "error",
    "answer",
    "answer_score",
    "format_valid",
    "metrics",
    "advantage_raw",
    "silver",
    f"{_TURN}kind",
    f"{_TURN}query",
    f"{_TURN}correctness",
    f"{_TURN}softened",
    f"{_TURN}repeated",
    f"{_TURN}documents.list.element.id",
)
_GROUP = re.compile(r"data/group_(\d{1,9})_(\d{1,9})\.json")
_GROUP_PAGE = re.compile(r"page/step_(\d{1,9})_group_(\d{1,9})\.html")
_QUESTION = re.compile(r"data/question_(\d{1,9})\.json")


class StepFile(NamedTuple):
    """One version of a kept step's file; time and size tell it from the next version."""

    step: int
    path: Path
    modified_ns: int  # nanoseconds
    size: int  # bytes


class Site:
    """The trajectory page of a run, which may go on: its kept steps, by address.

    Methods read the newest files, and raise UserError if one is damaged.

    Raises:
        UserError: the folder keeps neither steps nor evaluations, or the run's tokenizer is missing.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.evaluations = Evaluations(folder)
        self._read_table = lru_cache(maxsize=_TABLES_HELD)(_read_table)
        self._steps: dict[StepFile, dict[str, Any]] = {}
        if kept_steps(folder):
            self._pieces.text([])  # loads the tokenizer, so that a missing one is reported at once
        elif self._config().get("log", {}).get("rollouts", "none") == "none" and not self.evaluations.names():
            raise UserError(
                f"{folder}: no rollouts/step_N.parquet there; give the folder of a run with log.rollouts"
            )

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(self.folder / self._metadata()["tokenizer"])

    def _metadata(self) -> dict[str, str]:
        """Return the metadata of the newest kept step."""
        paths = list(kept_steps(self.folder).values())
        return read_metadata(paths[-1])

    def _config(self) -> dict[str, Any]:
        """Return the config of the newest kept step; before the first step, of the newest start, if any."""
        if kept_steps(self.folder):
            config: dict[str, Any] = json.loads(self._metadata()["config"])
            return config
        start = newest_start(self.folder)
        return start.config if start else {}

    def _step_files(self) -> dict[int, StepFile]:
        """Return the present version of each step's file."""
        files = {}
        for step, path in kept_steps(self.folder).items():
            with suppress(FileNotFoundError):  # removed meanwhile (log.rollouts_keep)
                status = path.stat()
                files[step] = StepFile(step, path, status.st_mtime_ns, status.st_size)
        return files

    def steps(self) -> list[dict[str, Any]]:
        """Return `tabulate` of every step; a step's file is read once, and again where it has changed."""
        steps: dict[StepFile, dict[str, Any]] = {}
        for file in self._step_files().values():
            steps[file] = self._steps.get(file) or _read_step(file)
        self._steps = steps
        return list(steps.values())

    def index_tag(self) -> str:
        """Return the HTTP entity tag of the index, which changes with the steps; no file is read."""
        versions = {
            step: (file.path, file.modified_ns, file.size) for step, file in self._step_files().items()
        }
        state = [versions, self.evaluations.names()]
        digest = hashlib.sha256(repr(state).encode()).hexdigest()
        return f'"{digest[:32]}"'

    def get(self, address: str) -> bytes | None:
        """Return the content of an address such as "data/index.json"; None where there is nothing."""
        if address == INDEX:
            return self._index()
        if match := _GROUP.fullmatch(address):
            data = self.group(int(match[1]), int(match[2]))
            return None if data is None else _json(data)
        if match := _GROUP_PAGE.fullmatch(address):
            data = self.group(int(match[1]), int(match[2]))
            return None if data is None else render_groups(self.name, [data]).encode()
        if address == EVALUATIONS:
            return _json(self.evaluations.index())
        if match := _QUESTION.fullmatch(address):
            question = self.evaluations.question(int(match[1]))
            return None if question is None else _json(question)
        static_names = {path.name for path in STATIC.iterdir()}
        if address in static_names:
            return (STATIC / address).read_bytes()
        return None

    @property
    def name(self) -> str:
        """The name of the run on its pages."""
        return run_name(self.folder)

    def _index(self) -> bytes:
        steps = self.steps()
        config = self._config()
        return _json(
            {
                "name": self.name,
                "advantage": config.get("advantage", {}),
                "planned": int(config.get("learner", {}).get("steps", 0)),
                "steps": steps,
                "evaluations": self.evaluations.names(),
            }
        )

    def rows(self, step: int, group: int) -> list[RecordRow]:
        """Return the trajectories of a group with all their columns; an empty list where it is not kept."""
        file = self._step_files().get(step)
        if file is None:
            return []
        rows: list[RecordRow] = self._read_table(file).filter(pc.field("group") == group).to_pylist()
        return rows

    def group(self, step: int, group: int) -> dict[str, Any] | None:
        """Return the `transcript` of a group; None where it is not kept."""
        rows = self.rows(step, group)
        if not rows:
            return None
        metadata = self._metadata()
        config = AdvantageConfig()
        vars(config).update(json.loads(metadata["advantage"]))  # unchecked: older runs had other keys, values
        return transcript(rows, self._pieces, config, shared_fields(metadata))


def _read_table(file: StepFile) -> pa.Table:
    return read_columns(file.path)


def _read_step(file: StepFile) -> dict[str, Any]:
    """Return the number of a step and `tabulate` of its trajectories."""
    turns = read_columns(file.path, [f"{_TURN}token_ids.list.element"])["turns"].combine_chunks()
    tokens_by_turn = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids"))
    row_of_turn = pc.list_parent_indices(turns)
    lengths = np.bincount(row_of_turn, tokens_by_turn, len(turns)).astype(np.int64)
    rows = read_columns(file.path, _COLUMNS).to_pylist()
    return {"step": file.step, **tabulate(rows, lengths.tolist())}


def flags_of(row: RecordRow) -> int:
    """Return the FLAGS of a trajectory as bits.

    Wrong: finished, and its answer equals no golden answer (no exact match). A good search found silver
    documents that count (correctness above 0), or a supporting passage.
    """
    if row["error"] is not None:
        return 1 << FLAGS.index("failed")
    turns = row["turns"]
    kinds = {turn["kind"] for turn in turns}
    metrics = dict(row["metrics"])
    seen_ids = {document["id"] for turn in turns for document in turn["documents"]}
    has_supporting = not seen_ids.isdisjoint(row["supporting_ids"])
    flags = {
        "formatInvalid": not row["format_valid"],
        "invalid": "invalid" in kinds,
        "unfinished": "unfinished" in kinds,
        "wrong": metrics["em"] < 1,
        "goodSearch": has_supporting or any(turn["correctness"] for turn in turns),
        "softened": any(turn["softened"] for turn in turns),
        "repeated": any(turn["repeated"] for turn in turns),
    }
    return sum(1 << FLAGS.index(name) for name, holds in flags.items() if holds)


def tabulate(rows: Sequence[RecordRow], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the trajectories of a step, in the order of their groups, as columns.

    Args:
        rows: the trajectories.
        lengths: number of sampled tokens of each.

    Returns:
        ``instructive``: the numbers of the ``group`` and the ``trajectory`` to open first. In ``groups``
        and ``rows`` each column -> values: the column ``group`` of the rows is a place in ``groups``, and
        ``queries`` has one query a line.
    """
    first_rows: dict[int, RecordRow] = {}  # the first row of each group
    for row in rows:
        first_rows.setdefault(row["group"], row)
    groups = sorted(first_rows)
    places = {group: place for place, group in enumerate(groups)}
    firsts = [first_rows[group] for group in groups]
    queries = [_queries(row) for row in rows]
    flags = [flags_of(row) for row in rows]
    return {
        "instructive": _instructive(rows, flags),
        "groups": {
            "group": groups,
            "question": [row["question"] for row in firsts],
            "source": [row["data_source"] for row in firsts],
            "golden": [row["golden_answers"] for row in firsts],
            "silver": [len(row["silver"]) for row in firsts],
        },
        "rows": {
            "group": [places[row["group"]] for row in rows],
            "index": [row["index"] for row in rows],
            "score": [round(row["answer_score"], 4) for row in rows],
            "flags": flags,
            "advantage": [_rounded(row["advantage_raw"]) for row in rows],
            "searches": [len(queries_of_row) for queries_of_row in queries],
            "length": list(lengths),
            "answer": [row["answer"] for row in rows],
            "queries": ["\n".join(queries_of_row) for queries_of_row in queries],
        },
    }


def _instructive(rows: Sequence[RecordRow], flags: Sequence[int]) -> dict[str, int]:
    """Return the ``group`` that shows most of the credit, and the ``trajectory`` of it to begin with.

    A group counts more if a turn of it was softened, if right and wrong answers stand side by side, and if a
    wrong answer follows a good search. Of equal groups the first is taken. The trajectory is the group's
    first softened one; without one, its first.

    Args:
        rows: the trajectories of a step.
        flags: their `flags_of`.

    Returns:
        The two numbers; nothing without a row.
    """
    members: dict[int, list[tuple[int, int]]] = {}  # group -> index and flags of its trajectories
    for row, row_flags in zip(rows, flags, strict=True):
        members.setdefault(row["group"], []).append((row["index"], row_flags))
    if not members:
        return {}
    softened, wrong, good, failed = (
        1 << FLAGS.index(name) for name in ("softened", "wrong", "goodSearch", "failed")
    )

    def points(group: int) -> int:
        """Return how much a group shows."""
        finished = [row_flags for _, row_flags in members[group] if not row_flags & failed]
        has_softened = any(row_flags & softened for row_flags in finished)
        num_wrong = sum(bool(row_flags & wrong) for row_flags in finished)
        is_mixed = 0 < num_wrong < len(finished)
        has_unlucky = any(row_flags & wrong and row_flags & good for row_flags in finished)
        return 4 * has_softened + 2 * is_mixed + has_unlucky

    group = max(sorted(members), key=points)  # `max` returns the first of equal groups
    indices = [index for index, row_flags in members[group] if row_flags & softened]
    return {"group": group, "trajectory": indices[0] if indices else members[group][0][0]}


def _queries(row: RecordRow) -> list[str]:
    """Return the query of every action of a trajectory."""
    return [turn["query"] for turn in row["turns"] if turn["kind"] not in NO_ACTIONS]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
