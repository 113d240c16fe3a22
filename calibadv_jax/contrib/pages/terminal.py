"""A group of trajectories as lines for a terminal: ``calibadv inspect RUN --print``.

Texts of questions, documents and the policy are printed without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibadv_jax.contrib.pages.static_page import outcome, silver_titles
from calibadv_jax.contrib.pages.transcript import RecordRow, plain, signed
from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.trajectory import Document
from calibadv_jax.metrics.shown_steps import document_line, truncate, turn_lines

LONGEST_LINE = 400  # letters of a thought, a query or an answer


def group_lines(
    rows: Sequence[RecordRow], group: Mapping[str, Any], only: int | None = None
) -> Iterator[str]:
    """Yield the lines of a group.

    Args:
        rows: its trajectories, as the record keeps them.
        group: their `transcript`.
        only: index of the trajectory to print; None: all.
    """
    yield _line(
        f"step {group['step']} · group {group['group']} · {group['data_source']} · {group['question_id']}"
    )
    yield _line("question", group["question"])
    yield _line("accepted", " | ".join(group["golden_answers"]))
    if group["silver"]:
        titles = [f"★ {title} ({plain(weight)})" for title, weight in silver_titles(group)]
        yield _line("silver  ", ", ".join(titles))
    yield _line(group["brief"])
    for row, trajectory in zip(rows, group["trajectories"], strict=True):
        if only is None or trajectory["index"] == only:
            yield ""
            yield from _trajectory_lines(row, trajectory)


def _trajectory_lines(row: RecordRow, trajectory: Mapping[str, Any]) -> Iterator[str]:
    _, mark, word = outcome(trajectory)
    advantage = _advantage(trajectory["advantage_raw"])
    score = plain(trajectory["answer_score"])
    origin = f", {trajectory['origin']}" if trajectory["origin"] else ""
    yield f"{mark} trajectory {trajectory['index']}{origin}: {word}, score {score}, advantage {advantage}"
    if trajectory["error"] is not None:
        yield _line("failed:", trajectory["error"], indent=2)
    for number, (kept, turn) in enumerate(zip(row["turns"], trajectory["turns"], strict=True), 1):
        change = _advantage(turn["advantage"])
        if turn["advantage_raw"] is not None and turn["advantage"] != turn["advantage_raw"]:
            change = f"{_advantage(turn['advantage_raw'])} → {change}"
        notes = [turn["flaw"], turn["brief"] or turn["why"]]
        yield _line(f"{number} {turn['kind']}", change, *notes, indent=2)
        for line in turn_lines(kept["kind"], kept["think"] or "", kept["query"] or "", kept["text"]):
            yield f"      {truncate(line, LONGEST_LINE)}"
        if turn["kind"] == "answer":
            yield _line("answer", kept["answer"] or "", indent=6)
        for place, document in enumerate(turn["documents"], 1):
            star = "★" if document["weight"] is not None else " "
            shown = Document(document["id"], document["title"], document["text"])
            yield f"    {star}{document_line(place, shown)}"


def _advantage(value: float | None) -> str:
    return "–" if value is None else signed(value)


def _line(*parts: str, indent: int = 0) -> str:
    """Join the parts by two spaces, without control characters; the line has at most LONGEST_LINE letters."""
    text = "  ".join(to_printable_line(part) for part in parts if part)
    return truncate(" " * indent + text, LONGEST_LINE)
