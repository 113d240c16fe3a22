"""A compact index of all trajectories: what the page lists and filters without any transcript."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.pages.run_files import Row, RunFiles
from calibadv_jax.core.trajectory import NO_ACTIONS

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
