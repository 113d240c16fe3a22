"""Trajectories and their credit as rows of `schema.SCHEMA`, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.core.trajectory import SEARCH_ALONE, Document, Group, Question, Trajectory, Turn

Row = dict[str, Any]
Logprobs = list[list[np.ndarray | None]]  # float32 [T] of each trajectory of each group, as its response


def to_rows(
    step: int, groups: Sequence[Group], credits: Sequence[GroupCredit], learner_logprobs: Logprobs
) -> list[Row]:
    """Rows of a step; arrays stay arrays.

    Args:
        learner_logprobs: float32 [T] of the response of every finished trajectory, None if not computed.
    """
    rows = []
    for number, (group, credit, known) in enumerate(zip(groups, credits, learner_logprobs, strict=True)):
        shared = {"step": step, "group": number, "silver": credit.silver}
        of_group = [_row(one) | shared for one in group.failed]
        for position, (one, logprobs) in enumerate(zip(group.trajectories, known, strict=True)):
            row = _row(one) | shared | {"advantage_raw": float(credit.raw[position])}
            _add_credit(row["turns"], credit, position)
            if logprobs is not None:
                _add_logprobs(row["turns"], logprobs)
            of_group.append(row)
        rows += sorted(of_group, key=lambda row: row["index"])
    return rows


def _row(one: Trajectory) -> Row:
    """A trajectory as if it had no credit."""
    return {
        "index": one.index,
        "question_id": one.question.id,
        "question": one.question.text,
        "data_source": one.question.data_source,
        "golden_answers": one.question.golden_answers,
        "supporting_ids": one.question.supporting_ids,
        "error": one.error,
        "answer": one.answer,
        "answer_score": one.answer_score,
        "format_valid": one.format_valid,
        "metrics": one.metrics,
        "policy_versions": one.policy_versions,
        "seconds": one.seconds,
        "prompt_ids": one.prompt_ids,
        "first_opening": one.first_opening,
        "turns": [_turn_row(turn) for turn in one.turns],
        "advantage_raw": None,
    }


def _turn_row(turn: Turn) -> Row:
    """A turn as if it had no credit."""
    return {
        "kind": turn.kind,
        "text": turn.text,
        "think": turn.think,
        "query": turn.query,
        "answer": turn.answer,
        "stop_reason": turn.stop_reason,
        "is_refused": turn.is_refused,
        "policy_versions": turn.policy_versions,
        "token_ids": turn.token_ids,
        "logprobs": turn.logprobs,
        "learner_logprobs": None,
        "observation_ids": turn.observation_ids,
        "observation_text": turn.observation_text,
        "documents": [
            {"id": one.id, "title": one.title, "text": one.text, "score": one.score} for one in turn.documents
        ],
        "advantage_raw": None,
        "advantage": 0.0,
        "correctness": 0.0,
        "softened": False,
        "repeated": None,
        "found_silver": (),
        "golden_logprobs": turn.golden_logprobs,
        "values": turn.values,
    }


def _add_credit(turns: list[Row], credit: GroupCredit, position: int) -> None:
    for index, turn in enumerate(turns):
        turn["advantage_raw"] = float(credit.before[position][index])
        turn["advantage"] = float(credit.turns[position][index])
        turn["correctness"] = float(credit.correctness[position][index])
        if credit.softened:
            turn["softened"] = bool(credit.softened[position][index])
        if credit.repeated:
            turn["repeated"] = credit.repeated[position][index]
            turn["found_silver"] = credit.found_silver[position][index]


def _add_logprobs(turns: list[Row], logprobs: np.ndarray) -> None:
    start = 0
    for turn in turns:
        turn["learner_logprobs"] = logprobs[start : start + len(turn["token_ids"])]
        start += len(turn["token_ids"]) + len(turn["observation_ids"])


def from_rows(
    rows: Sequence[Row], opening: str, actions: tuple[str, ...] = SEARCH_ALONE
) -> tuple[list[Group], list[GroupCredit], Logprobs]:
    """The groups of a step, their credit and the learner's log-probabilities.

    Args:
        rows: as `pyarrow.Table.to_pylist` gives them with maps as dictionaries, arrays or lists.
        opening, actions: of every trajectory, see `Trajectory`.
    """
    groups, credits, logprobs = [], [], []
    for _, chosen in groupby(rows, lambda row: row["group"]):
        members = list(chosen)
        question = _question(members[0])
        group = Group.of(question, [_trajectory(row, question, opening, actions) for row in members])
        finished = [row for row in members if row["error"] is None]
        groups.append(group)
        credits.append(_credit(group, finished, dict(members[0]["silver"])))
        logprobs.append([_logprobs(row, one) for row, one in zip(finished, group.trajectories, strict=True)])
    return groups, credits, logprobs


def _question(row: Row) -> Question:
    return Question(
        row["question_id"],
        row["question"],
        tuple(row["golden_answers"]),
        row["data_source"],
        tuple(row["supporting_ids"]),
    )


def _trajectory(row: Row, question: Question, opening: str, actions: tuple[str, ...]) -> Trajectory:
    return Trajectory(
        question,
        np.asarray(row["prompt_ids"], np.int32),
        [_turn(turn) for turn in row["turns"]],
        row["index"],
        row["seconds"],
        row["error"],
        row["format_valid"],
        row["answer_score"],
        dict(row["metrics"]),
        opening,
        actions,
        row.get("first_opening"),
    )


def _turn(row: Row) -> Turn:
    return Turn(
        kind=row["kind"],
        token_ids=np.asarray(row["token_ids"], np.int32),
        logprobs=np.asarray(row["logprobs"], np.float32),  # JSON has null where a number is not finite: NaN
        text=row["text"],
        think=row["think"],
        query=row["query"],
        answer=row["answer"],
        documents=tuple(Document(**document) for document in row["documents"]),
        is_refused=row["is_refused"],
        observation_ids=np.asarray(row["observation_ids"], np.int32),
        observation_text=row["observation_text"],
        stop_reason=row["stop_reason"],
        policy_versions=tuple(row["policy_versions"]),
        golden_logprobs=dict(row.get("golden_logprobs") or {}),
        values=None if row.get("values") is None else np.asarray(row["values"], np.float32),
    )


def _credit(group: Group, finished: Sequence[Row], silver: dict[str, float]) -> GroupCredit:
    def column(name: str, kind: type) -> list[np.ndarray]:
        return [np.array([turn[name] for turn in row["turns"]], kind) for row in finished]

    return GroupCredit(
        group=group,
        raw=np.array([row["advantage_raw"] for row in finished], np.float64),
        before=column("advantage_raw", np.float64),
        turns=column("advantage", np.float64),
        correctness=column("correctness", np.float64),
        silver=silver,
        softened=column("softened", np.bool_),
        repeated=[[turn["repeated"] for turn in row["turns"]] for row in finished],
        found_silver=[[tuple(turn["found_silver"]) for turn in row["turns"]] for row in finished],
    )


def _logprobs(row: Row, one: Trajectory) -> np.ndarray | None:
    """float32 [T] of the response, 0 on observation tokens; None where none were kept."""
    if not row["turns"] or any(turn["learner_logprobs"] is None for turn in row["turns"]):
        return None
    parts = []
    for row_of_turn, turn in zip(row["turns"], one.turns, strict=True):
        parts.append(np.asarray(row_of_turn["learner_logprobs"], np.float32))
        parts.append(np.zeros(len(turn.observation_ids), np.float32))
    return np.concatenate(parts)
