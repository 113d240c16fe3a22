"""Console output of each step: its line, why nothing was learned, some transcripts.

Texts of a policy or a document are printed without control characters, so that they never command the
terminal.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Group, Trajectory
from calibadv_jax.metrics.console import Console

REPEAT_TIED = 10  # tied steps in a row after which the reason is printed again
NARROWEST = 60  # columns; a terminal may report fewer, or none
LONGEST = 1000  # characters of a turn in `transcript`

# Kind of the last turn of trajectories without an answer -> what to try.
CAUSES = {
    "action": "search until no search or no room is left: raise rollout.max_searches or rollout.max_length",
    "invalid": "end with a turn that neither searches nor answers: teach the format first (calibadv sft), or"
    " choose another prompt.template",
    "unfinished": "are cut before they answer: raise rollout.max_turn_length and rollout.max_length, or teach"
    " the format first (calibadv sft)",
}
# Kind of the last turn of a trajectory without an answer -> why there is none; other kinds are actions.
ENDINGS = {
    "action": "its last {kind} came after the last one allowed (rollout.max_searches), or found no room",
    "invalid": "its last turn neither searches nor answers",
    "unfinished": "its last turn was cut (rollout.max_turn_length, rollout.max_length)",
}


class ShownSteps:
    """Shows each step of a run of `total` steps, with `transcripts` trajectories of it."""

    def __init__(self, console: Console, total: int, transcripts: int):
        self._console, self._total, self._transcripts = console, total, transcripts
        self._tied, self._reason = 0, ""  # tied steps in a row, and the last one's reason

    def show(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Show a step with its scored groups; call it once a step."""
        self._console.step(step, self._total, metrics)
        self._warn_if_tied(step, groups)
        for trajectory in chosen(groups, self._transcripts):
            for line in transcript(trajectory):
                self._console.tell(line)

    def _warn_if_tied(self, step: int, groups: Sequence[Group]) -> None:
        reason = why_tied(groups)
        self._tied = self._tied + 1 if reason else 0
        if reason and (reason != self._reason or self._tied % REPEAT_TIED == 0):
            tied = f"all {len(groups)} groups" if self._tied == 1 else f"for {self._tied} steps all groups"
            hint = "" if self._transcripts else "; log.transcripts=1 shows one a step"
            self._console.warn(
                f"step {step}: {tied} tied: nothing was learned from the rewards: {reason}{hint}"
            )
        self._reason = reason


def why_tied(groups: Sequence[Group]) -> str:
    """Say why no group has two different scores, and what to try; "" where one has, or nothing finished."""
    finished = [group.trajectories for group in groups if group.trajectories]
    scores = [{trajectory.answer_score for trajectory in trajectories} for trajectories in finished]
    if not finished or max(map(len, scores)) > 1:
        return ""
    if set().union(*scores) == {0.0}:
        zero = [trajectory for trajectories in finished for trajectory in trajectories]
        return f"all trajectories score 0; {_why_zero(zero)}"
    if all(trajectories[0].relative_score >= 1 for trajectories in finished):
        return "all answers are right; these questions are too easy: choose harder questions"
    if max(map(len, finished)) == 1:
        return "a group of one trajectory has nothing to compare; raise rollout.group_size"
    return (
        "the scores differ between questions, but not within a group; raise rollout.group_size or"
        " rollout.temperature, or leave out questions that are too easy or too hard"
    )


def _why_zero(trajectories: Sequence[Trajectory]) -> str:
    """Name the most frequent reason of trajectories without a reward."""
    answered = [trajectory for trajectory in trajectories if trajectory.answer is not None]
    last = [t.turns[-1] for t in trajectories if t.answer is None and t.turns]
    kinds = Counter("action" if turn.is_action else turn.kind for turn in last)
    if kinds.total() > len(answered):
        return f"most do not answer, and of these most {CAUSES[kinds.most_common(1)[0][0]]}"
    if any(not trajectory.format_valid and trajectory.metrics.get("f1") for trajectory in answered):
        return (
            "some answers are right, but all of those in the wrong format: teach the format first (calibadv"
            " sft), or set reward.format=false"
        )
    return (
        "all answers are wrong: choose easier questions, raise rollout.group_size, or set reward.answer=f1,"
        " which pays partly right answers"
    )


def transcript(trajectory: Trajectory) -> Iterator[str]:
    """Yield question, turns, documents and end of a scored trajectory, a line each."""
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


def turn_lines(kind: str, think: str, query: str, text: str) -> Iterator[str]:
    """Yield a turn's thought and request; its whole text where it neither acts nor answers."""
    if think:
        yield f"think   {printable(think)}"
    if kind not in NO_ACTIONS:
        yield f"{kind}  {printable(query)}"
    elif kind != "answer":
        yield f"{kind}  {printable(text)}"


def folded(number: int, document: Document) -> str:
    """Return number, title and first words of a document, as many as fit a line of the terminal."""
    width = max(shutil.get_terminal_size().columns, NARROWEST)
    return cut(f"  [{number}]   {printable(document.title)}: {printable(document.text)}", width)


def ending(trajectory: Trajectory) -> str:
    """Return the answer, or why there is none."""
    if trajectory.answer is not None:
        return f"answer  {printable(trajectory.answer)}"
    kind = trajectory.turns[-1].kind
    return f"no answer: {ENDINGS.get(kind, ENDINGS['action'].format(kind=kind))}"


def cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def chosen(groups: Sequence[Group], number: int) -> list[Trajectory]:
    """Return the first trajectory of at most `number` groups, which lie evenly over the step."""
    groups = [group for group in groups if group.attempts]
    number = min(number, len(groups))
    return [groups[place * len(groups) // number].attempts[0] for place in range(number)]
