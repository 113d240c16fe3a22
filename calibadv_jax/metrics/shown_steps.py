"""Console output of each step: its line, why nothing was learned, some transcripts.

Texts of a policy or a document are printed without control characters, so that they never command the
terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Group, Trajectory
from calibadv_jax.metrics.console import Console

REPEAT_TIED = 10  # tied steps in a row after which the reason is printed again
LONGEST_DOCUMENT = 120  # characters of a document's line
LONGEST = 1000  # characters of a turn in `transcript`

# Kind of the last turn of a trajectory without an answer ("action": any) -> why there is none, what to try.
ENDINGS = {
    "action": "its last {kind} had no turn or no room left: raise rollout.max_searches or rollout.max_length",
    "invalid": "its last turn neither searches nor answers: teach the format first (calibadv sft)",
    "unfinished": "its last turn was cut: raise rollout.max_turn_length or rollout.max_length",
}


class ShownSteps:
    """Shows each step of a run of `total` steps, with `transcripts` trajectories of it."""

    def __init__(self, console: Console, total: int, transcripts: int):
        self._console, self._total, self._transcripts = console, total, transcripts
        self._tied, self._reason = 0, ""  # tied steps in a row, and the last one's reason

    def show(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Show a step with its scored groups; call it once a step."""
        self._console.step(step, self._total, metrics)
        reason = why_tied(groups)
        self._tied = self._tied + 1 if reason else 0
        if reason and (reason != self._reason or self._tied % REPEAT_TIED == 0):
            tied = f"step {step}: all groups tied" + (f" for {self._tied} steps" if self._tied > 1 else "")
            hint = "" if self._transcripts else "; log.transcripts=1 shows one a step"
            self._console.warn(f"{tied}: nothing was learned from the rewards: {reason}{hint}")
        self._reason = reason
        for trajectory in _spread(groups, self._transcripts):
            for line in transcript(trajectory):
                self._console.tell(line)


def why_tied(groups: Sequence[Group]) -> str:
    """Return why no group has two different scores, and advice; "" where one has, or nothing finished."""
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
    advice = "raise rollout.group_size or rollout.temperature, or leave out too easy and too hard questions"
    return f"the scores differ between questions, but not within a group; {advice}"


def _why_zero(trajectories: Sequence[Trajectory]) -> str:
    """Name the most frequent reason of trajectories without a reward."""
    answered = [trajectory for trajectory in trajectories if trajectory.answer is not None]
    last = [t.turns[-1] for t in trajectories if t.answer is None and t.turns]
    kinds = Counter("action" if turn.is_action else turn.kind for turn in last)
    if kinds.total() > len(answered):
        kind = kinds.most_common(1)[0][0]
        return f"most do not answer; the most frequent reason: {ENDINGS[kind].format(kind=kind)}"
    if any(not trajectory.format_valid and trajectory.metrics.get("f1") for trajectory in answered):
        way_out = "teach the format first (calibadv sft), or set reward.format=false"
        return f"some answers are right, but all of those in the wrong format: {way_out}"
    way_out = "choose easier questions, raise rollout.group_size, or set reward.answer=f1 (partly right)"
    return f"all answers are wrong: {way_out}"


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
    """Return number, title and first words of a document."""
    return cut(f"  [{number}]   {printable(document.title)}: {printable(document.text)}", LONGEST_DOCUMENT)


def ending(trajectory: Trajectory) -> str:
    """Return the answer, or why there is none."""
    if trajectory.answer is not None:
        return f"answer  {printable(trajectory.answer)}"
    kind = trajectory.turns[-1].kind
    return f"no answer: {ENDINGS.get(kind, ENDINGS['action']).format(kind=kind)}"


def cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _spread(groups: Sequence[Group], number: int) -> list[Trajectory]:
    """Return the first trajectory of at most `number` groups, which lie evenly over the step."""
    groups = [group for group in groups if group.attempts]
    number = min(number, len(groups))
    return [groups[place * len(groups) // number].attempts[0] for place in range(number)]
