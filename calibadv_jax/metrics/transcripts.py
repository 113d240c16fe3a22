"""Trajectories as lines for a terminal. What a policy or a document says never commands it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Group, Trajectory

NARROWEST = 60  # columns; a terminal may report fewer, or none
LONGEST = 1000  # characters of a turn in `transcript`

ENDINGS = {  # kind of the last turn of a trajectory without an answer -> why there is none; else an action's
    "action": "its last {kind} came after the last one allowed (rollout.max_searches), or found no room",
    "invalid": "its last turn neither searches nor answers",
    "unfinished": "its last turn was cut (rollout.max_turn_length, rollout.max_length)",
}


def cut(line: str, width: int) -> str:
    """The line, at most so many characters of it."""
    return line if len(line) <= width else line[: width - 1] + "…"


def turn_lines(kind: str, think: str, query: str, text: str) -> Iterator[str]:
    """What a turn thinks and asks for; all of it where it does neither act nor answer."""
    if think:
        yield f"think   {printable(think)}"
    if kind not in NO_ACTIONS:
        yield f"{kind}  {printable(query)}"
    elif kind != "answer":
        yield f"{kind}  {printable(text)}"


def folded(number: int, document: Document) -> str:
    """Number, title and first words, as much as fits a line of the terminal."""
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    return cut(f"  [{number}]   {printable(document.title)}: {printable(document.text)}", width)


def ending(trajectory: Trajectory) -> str:
    """The answer, or why there is none."""
    if trajectory.answer is not None:
        return f"answer  {printable(trajectory.answer)}"
    kind = trajectory.turns[-1].kind
    return f"no answer: {ENDINGS.get(kind, ENDINGS['action'].format(kind=kind))}"


def transcript(trajectory: Trajectory) -> Iterator[str]:
    """Question, turns, documents and end of a scored trajectory, a line each."""
    validity = "valid" if trajectory.format_valid else "invalid"
    yield f"transcript: score {trajectory.answer_score:.3f}, format {validity}"
    yield cut(f"question  {printable(trajectory.question.text)}", LONGEST)
    for turn in trajectory.turns:
        for line in turn_lines(turn.kind, turn.think, turn.query, turn.text):
            yield cut(line, LONGEST)
        yield from (folded(number, document) for number, document in enumerate(turn.documents, 1))
    if trajectory.error is not None:
        yield f"failed: {printable(trajectory.error)}"
    elif trajectory.turns:
        yield cut(ending(trajectory), LONGEST)


def chosen(groups: Sequence[Group], number: int) -> list[Trajectory]:
    """At most so many trajectories, of groups that lie evenly over the step; the first of each."""
    groups = [group for group in groups if group.attempts]
    number = min(number, len(groups))
    return [groups[place * len(groups) // number].attempts[0] for place in range(number)]
