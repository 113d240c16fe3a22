"""Console output of each step: its line, why nothing was learned, some transcripts.

Texts of a policy or a document are printed without control characters, so that they cannot control the
terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Group, Trajectory
from calibadv_jax.metrics.console import Console

REPEAT_TIED = 10  # number of tied steps in a row after which the reason is printed again
LONGEST_DOCUMENT = 120  # characters of a document's line in `transcript`
LONGEST_LINE = 1000  # characters of every other line in `transcript`

# Kind of the last turn of a trajectory without an answer -> why there is no answer, and what to try. "action"
# stands for the kinds of all actions.
ENDINGS = {
    "action": "its last {kind} had no turn or no room left: raise rollout.max_searches or rollout.max_length",
    "invalid": "its last turn neither searches nor answers: teach the format first (calibadv sft)",
    "unfinished": "its last turn was cut: raise rollout.max_turn_length or rollout.max_length",
}


class StepReporter:
    """Shows each step of a run.

    Args:
        console: Where the steps are shown.
        total: Number of steps of the run.
        transcripts: Number of trajectories of each step that are shown.
    """

    def __init__(self, console: Console, total: int, transcripts: int):
        self._console = console
        self._total = total
        self._transcripts = transcripts
        self._num_tied = 0  # tied steps in a row
        self._reason = ""  # why the last step was tied; empty if it was not

    def show(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Show a step; call it once a step.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            groups: Scored groups of the step.
        """
        self._console.step(step, self._total, metrics)
        self._warn_if_tied(step, why_tied(groups))
        for trajectory in _spread(groups, self._transcripts):
            for line in transcript(trajectory):
                self._console.tell(line)

    def _warn_if_tied(self, step: int, reason: str) -> None:
        """Warn of a tied step with a new reason, and again after every REPEAT_TIED tied steps in a row."""
        self._num_tied = self._num_tied + 1 if reason else 0
        is_new = reason != self._reason
        if reason and (is_new or self._num_tied % REPEAT_TIED == 0):
            times = f" for {self._num_tied} steps" if self._num_tied > 1 else ""
            hint = "" if self._transcripts else "; log.transcripts=1 shows one a step"
            self._console.warn(
                f"step {step}: all groups tied{times}: nothing was learned from the rewards: {reason}{hint}"
            )
        self._reason = reason


def why_tied(groups: Sequence[Group]) -> str:
    """Return why no group has two different scores, with advice.

    Args:
        groups: Scored groups of a step.

    Returns:
        Empty if a group has two different scores, or if no trajectory has finished.
    """
    finished = [group.trajectories for group in groups if group.trajectories]
    group_scores = [{trajectory.answer_score for trajectory in trajectories} for trajectories in finished]
    if not finished or any(len(scores) > 1 for scores in group_scores):
        return ""
    if all(scores == {0.0} for scores in group_scores):
        cause = _why_zero([trajectory for trajectories in finished for trajectory in trajectories])
        return f"all trajectories score 0; {cause}"
    if all(trajectories[0].relative_score >= 1 for trajectories in finished):
        return "all answers are right; these questions are too easy: choose harder questions"
    if all(len(trajectories) == 1 for trajectories in finished):
        return "a group of one trajectory has nothing to compare; raise rollout.group_size"
    return (
        "the scores differ between questions, but not within a group; raise rollout.group_size or"
        " rollout.temperature, or leave out too easy and too hard questions"
    )


def _why_zero(trajectories: Sequence[Trajectory]) -> str:
    """Return the most frequent cause of a score of 0, with advice."""
    answered = [trajectory for trajectory in trajectories if trajectory.answer is not None]
    last_kinds: Counter[str] = Counter()  # kinds of the last turns of trajectories without an answer
    for trajectory in trajectories:
        if trajectory.answer is None and trajectory.turns:
            last_turn = trajectory.turns[-1]
            last_kinds["action" if last_turn.is_action else last_turn.kind] += 1
    if last_kinds.total() > len(answered):
        kind = last_kinds.most_common(1)[0][0]
        return f"most do not answer; the most frequent reason: {ENDINGS[kind].format(kind=kind)}"
    if any(not trajectory.format_valid and trajectory.metrics.get("f1") for trajectory in answered):
        return (
            "some answers are right, but all of those in the wrong format: teach the format first (calibadv"
            " sft), or set reward.format=false"
        )
    return (
        "all answers are wrong: choose easier questions, raise rollout.group_size, or set reward.answer=f1"
        " (partly right)"
    )


def transcript(trajectory: Trajectory) -> Iterator[str]:
    """Yield question, turns, documents and end of a scored trajectory, a line each."""
    validity = "valid" if trajectory.format_valid else "invalid"
    yield f"transcript: score {trajectory.answer_score:.3f}, format {validity}"
    yield truncate(f"question  {to_printable_line(trajectory.question.text)}", LONGEST_LINE)
    for turn in trajectory.turns:
        for line in turn_lines(turn.kind, turn.think, turn.query, turn.text):
            yield truncate(line, LONGEST_LINE)
        for number, document in enumerate(turn.documents, 1):
            yield document_line(number, document)
    if trajectory.error is not None:
        yield f"failed: {to_printable_line(trajectory.error)}"
    elif trajectory.turns:
        yield truncate(answer_line(trajectory), LONGEST_LINE)


def turn_lines(kind: str, think: str, query: str, text: str) -> Iterator[str]:
    """Yield a turn's thought and request, or its whole text if it neither acts nor answers.

    Args:
        kind: Kind of the turn.
        think: Its thought; may be empty.
        query: What an action asks for.
        text: All of its text.
    """
    if think:
        yield f"think   {to_printable_line(think)}"
    if kind not in NO_ACTIONS:
        yield f"{kind}  {to_printable_line(query)}"
    elif kind != "answer":
        yield f"{kind}  {to_printable_line(text)}"


def document_line(number: int, document: Document) -> str:
    """Return a line with the number, the title and the beginning of a document."""
    return truncate(
        f"  [{number}]   {to_printable_line(document.title)}: {to_printable_line(document.text)}",
        LONGEST_DOCUMENT,
    )


def answer_line(trajectory: Trajectory) -> str:
    """Return the answer of a trajectory with turns, or why there is none."""
    if trajectory.answer is not None:
        return f"answer  {to_printable_line(trajectory.answer)}"
    kind = trajectory.turns[-1].kind
    cause = ENDINGS.get(kind, ENDINGS["action"]).format(kind=kind)
    return f"no answer: {cause}"


def truncate(line: str, width: int) -> str:
    """Return a line of at most `width` characters; an ellipsis stands for what was cut."""
    return line if len(line) <= width else line[: width - 1] + "…"


def _spread(groups: Sequence[Group], number: int) -> list[Trajectory]:
    """Return the first trajectory of at most `number` groups that are spread evenly over the step."""
    groups = [group for group in groups if group.attempts]
    number = min(number, len(groups))
    return [groups[place * len(groups) // number].attempts[0] for place in range(number)]
