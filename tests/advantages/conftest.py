"""Builders of trajectories and groups, and the reader of golden credit-assignment cases."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn


def make_turn(kind="search", think="", documents=(), num_tokens=1, num_observed=0, golden=-1.0) -> Turn:
    return Turn(
        kind=kind,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        think=think,
        documents=tuple(Document(id=document, title="", text="") for document in documents),
        observation_ids=np.full(num_observed, 7, np.int32),
        golden_logprobs={"current": golden, "initial": golden / 2},
        values=np.arange(num_tokens, dtype=np.float32) / 8 + np.float32(golden),
    )


def make_member(score, *searches, answer=1, valid=True, observed=0):
    """A member of a group: a search for each string of document ids (letters), then an answer turn."""
    turns = [make_turn(documents=documents, num_observed=observed) for documents in searches]
    return score, valid, [*turns, make_turn("answer", num_tokens=answer)]


def make_group(*members, question_id="q", failed=()) -> Group:
    """Members are (answer_score, format_valid, turns); those at the places `failed` have an error."""
    question, trajectories = Question(question_id, "?", ("gold",), "test"), []
    for index, (score, valid, turns) in enumerate(members):
        error = "retriever: gone" if index in failed else None
        made = Trajectory(question, np.zeros(3, np.int32), list(turns), index, 0.0, error, bool(valid), score)
        trajectories.append(made)
    return Group.from_attempts(question, trajectories)


def _read_turn(turn: dict) -> Turn:
    is_action = turn["kind"] == "answer" or turn["query"] != ""
    return make_turn(
        kind=turn["kind"] if is_action else "invalid",
        think=turn["think"],
        documents=turn.get("documents", ()),
        num_tokens=turn["num_tokens"],
        num_observed=turn.get("num_observation_tokens", 0),
    )


def read_case(case: dict) -> SimpleNamespace:
    """Groups by first appearance, the config, and the position in the case of each group's members."""
    members: dict[str, dict[int, tuple]] = {}
    for position, row in enumerate(case["trajectories"]):
        member = row["answer_score"], row["format_valid"], [_read_turn(turn) for turn in row["turns"]]
        members.setdefault(row["group"], {})[position] = member
    settings = case["settings"]
    config = AdvantageConfig(
        name="calibadv",
        silver_threshold=settings["silver_threshold"],
        correctness=settings["correctness"],
        soft_penalty=settings["soft_penalty"],
        rebalance=settings["rebalance"] == "answer_in_group",
        target_ratio=settings["lambda"],
        adjust=settings["adjust"],
    )
    groups = [make_group(*rows.values(), question_id=name) for name, rows in members.items()]
    return SimpleNamespace(groups=groups, config=config, positions=[list(rows) for rows in members.values()])


@pytest.fixture(scope="session")
def build() -> SimpleNamespace:
    return SimpleNamespace(turn=make_turn, member=make_member, group=make_group, case=read_case)
