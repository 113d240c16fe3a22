"""One group as the trajectory page shows it: every token with its text, and why it was praised or blamed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from calibadv_jax.contrib.pages.run_files import Row
from calibadv_jax.contrib.pages.tokens import Pieces
from calibadv_jax.contrib.pages.words import group_words, is_judged, trajectory_words, turn_words
from calibadv_jax.core.trajectory import SEARCH_ALONE, Trajectory
from calibadv_jax.record.reader import from_rows
from calibadv_jax.rewards.score import format_flaw, turn_flaws

_TURN_COLUMNS = (
    *("kind", "stop_reason", "is_refused", "policy_versions", "advantage_raw", "advantage"),
    *("correctness", "softened", "repeated", "found_silver"),
)


def transcript(
    rows: Sequence[Row],
    pieces: Pieces,
    settings: Mapping[str, Any],
    opening: str = "",
    actions: tuple[str, ...] = SEARCH_ALONE,
) -> dict[str, Any]:
    """A group in JSON's types.

    Args:
        rows: all trajectories of the group, with all columns.
        settings: the section `advantage` of the run's config.
        opening, actions: of every trajectory, see `Trajectory`.
    """
    first = rows[0]
    (group,), *_ = from_rows(rows, opening, actions)
    return {
        "step": first["step"],
        "group": first["group"],
        "question_id": first["question_id"],
        "question": first["question"],
        "data_source": first["data_source"],
        "golden_answers": first["golden_answers"],
        "supporting_ids": first["supporting_ids"],
        "silver": dict(first["silver"]),
        "prompt": pieces.text(first["prompt_ids"]),
        "why": group_words(rows, settings),
        "is_judged": is_judged(settings),
        "trajectories": [
            _trajectory(row, trajectory, rows, pieces, settings)
            for row, trajectory in zip(rows, group.attempts, strict=True)
        ],
    }


def _trajectory(
    row: Row, trajectory: Trajectory, group: Sequence[Row], pieces: Pieces, settings: Mapping[str, Any]
) -> dict[str, Any]:
    names: tuple[str, ...] = (
        "index",
        "error",
        "answer",
        "answer_score",
        "format_valid",
        "policy_versions",
        "advantage_raw",
    )
    turns = [
        _turn(place, row, pieces) | {"why": reason, "flaw": flaw}
        for place, (reason, flaw) in enumerate(
            zip(turn_words(row, settings), turn_flaws(trajectory), strict=True)
        )
    ]
    return {
        **{name: row[name] for name in names},
        "seconds": round(row["seconds"], 3),
        "metrics": dict(row["metrics"]),
        "why": trajectory_words(row, group, settings, format_flaw(trajectory)),
        "turns": turns,
    }


def _turn(place: int, row: Row, pieces: Pieces) -> dict[str, Any]:
    turn = row["turns"][place]
    seen = {document["id"] for earlier in row["turns"][:place] for document in earlier["documents"]}
    return {
        **{name: turn[name] for name in _TURN_COLUMNS},
        "ids": turn["token_ids"],
        "pieces": pieces.pieces(turn["token_ids"]),
        "logprobs": _rounded(turn["logprobs"]),
        "learner_logprobs": _rounded(turn["learner_logprobs"]),
        "observation": observation_parts(turn["observation_text"], turn["documents"]),
        "num_observation_tokens": len(turn["observation_ids"]),
        "documents": [_document(document, turn, row, seen) for document in turn["documents"]],
    }


def _document(document: Row, turn: Row, row: Row, seen: Collection[str]) -> dict[str, Any]:
    """
    Args:
        seen: ids of the documents of the trajectory's earlier turns.
    """
    identity = document["id"]
    return {
        **document,
        "weight": dict(row["silver"]).get(identity),
        "is_new": identity in turn["found_silver"],
        "is_seen": identity in seen,
        "is_supporting": identity in row["supporting_ids"],
    }


def observation_parts(text: str, documents: Sequence[Row]) -> list[dict[str, Any]]:
    """The observation in order, `{"text", "document"}`: each part shows a document (its place) or none.

    Documents are found by the headers that the agent loop writes; no document can forge one
    (`tags.neutralise`). An observation that was cut may lack the last documents.
    """
    starts = []
    position = 0
    for place, document in enumerate(documents):
        position = text.find(f'Doc {place + 1}(Title: "{document["title"]}', position)
        if position < 0:
            break
        starts.append((position, place))
        position += 1
    if not starts:
        return [{"text": text, "document": None}] if text else []
    end = text.rfind("</information>")
    stops = [start for start, _ in starts[1:]] + [end if end >= starts[-1][0] else len(text)]
    parts: list[dict[str, Any]] = [{"text": text[: starts[0][0]], "document": None}]
    for (start, place), stop in zip(starts, stops, strict=True):
        parts.append({"text": text[start:stop], "document": place})
    return [part for part in [*parts, {"text": text[stops[-1] :], "document": None}] if part["text"]]


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    """Four places; None for what JSON cannot say."""
    return None if values is None else [round(one, 4) if math.isfinite(one) else None for one in values]
