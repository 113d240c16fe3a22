"""What the console says of each step: its line, why nothing was learned, some transcripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.transcripts import chosen, transcript

SAID_AGAIN = 10  # tied steps in a row after which the reason is said once more

CAUSES = {  # kind of the last turn of the trajectories that do not answer -> what to try
    "action": "search until no search or no room is left: raise rollout.max_searches or rollout.max_length",
    "invalid": "end with a turn that neither searches nor answers: teach the format first (calibadv sft), or"
    " choose another prompt.template",
    "unfinished": "are cut before they answer: raise rollout.max_turn_length and rollout.max_length, or teach"
    " the format first (calibadv sft)",
}


class ShownSteps:
    """Says what a person should see of a step.

    Args:
        total: steps of the run.
        transcripts: trajectories of each step that are shown.
    """

    def __init__(self, console: Console, total: int, transcripts: int):
        self._console, self._total, self._transcripts = console, total, transcripts
        self._tied, self._reason = 0, ""  # steps in a row, and what was said of them last

    def show(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """To be called once a step, with its scored groups."""
        self._console.step(step, self._total, metrics)
        self._warn_if_tied(step, groups)
        for trajectory in chosen(groups, self._transcripts):
            for line in transcript(trajectory):
                self._console.tell(line)

    def _warn_if_tied(self, step: int, groups: Sequence[Group]) -> None:
        reason = why_tied(groups)
        self._tied = self._tied + 1 if reason else 0
        if reason and (reason != self._reason or self._tied % SAID_AGAIN == 0):
            groups_of = (
                f"all {len(groups)} groups" if self._tied == 1 else f"for {self._tied} steps all groups"
            )
            hint = "" if self._transcripts else "; log.transcripts=1 shows one a step"
            self._console.warn(
                f"step {step}: {groups_of} tied: nothing was learned from the rewards: {reason}{hint}"
            )
        self._reason = reason


def why_tied(groups: Sequence[Group]) -> str:
    """Why no group has two different scores, and what to try; empty where one has, or nothing finished."""
    finished = [group.trajectories for group in groups if group.trajectories]
    if not finished or any(len({one.answer_score for one in some}) > 1 for some in finished):
        return ""
    scores = {some[0].answer_score for some in finished}
    if scores == {0.0}:
        return f"all trajectories score 0; {_why_zero([one for some in finished for one in some])}"
    if all(trajectories[0].relative_score >= 1 for trajectories in finished):
        return "all answers are right; these questions are too easy: choose harder questions"
    if max(map(len, finished)) == 1:
        return "a group of one trajectory has nothing to compare; raise rollout.group_size"
    return (
        "the scores differ between questions, but not within a group; raise rollout.group_size or"
        " rollout.temperature, or leave out questions that are too easy or too hard"
    )


def _why_zero(trajectories: Sequence[Trajectory]) -> str:
    """The most frequent reason of trajectories without a reward."""
    silent = Counter(
        "action" if one.turns[-1].is_action else one.turns[-1].kind
        for one in trajectories
        if one.answer is None and one.turns
    )
    answered = [one for one in trajectories if one.answer is not None]
    unpaid = sum(not one.format_valid and bool(one.metrics.get("f1")) for one in answered)
    if silent.total() > len(answered):
        kind, _ = silent.most_common(1)[0]
        return f"most do not answer, and of these most {CAUSES[kind]}"
    if unpaid:
        return (
            "some answers are right, but all of those in the wrong format: teach the format first (calibadv"
            " sft), or set reward.format=false"
        )
    return (
        "all answers are wrong: choose easier questions, raise rollout.group_size, or set reward.answer=f1,"
        " which pays partly right answers"
    )
