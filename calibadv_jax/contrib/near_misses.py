"""Near misses: trajectories that found evidence and failed, from whose prefix a group goes on.

The idea is David-GRPO's (arXiv 2601.21699), which resamples the best trajectory of an unsolved group from the
point at which it had found the most evidence. Its tokens before that point are right, so that a second
attempt from there reaches what a small policy seldom reaches from the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from calibadv_jax.config import Config, RewardConfig
from calibadv_jax.core.trajectory import Trajectory
from calibadv_jax.rewards.score import score_trajectory, turn_flaws
from calibadv_jax.rollout.agent import Prefix


@dataclass(frozen=True)
class NearMiss:
    """A trajectory that found evidence and failed.

    Attributes:
        trajectory: The trajectory.
        num_passages: Number of supporting passages that it found.
        num_turns: Number of its turns up to the one that found the last of them.
    """

    trajectory: Trajectory
    num_passages: int
    num_turns: int

    def prefix(self) -> Prefix:
        """Return the turns up to the last finding, with its observation, as context."""
        turns = [replace(turn, is_context=True) for turn in self.trajectory.turns[: self.num_turns]]
        return Prefix(self.trajectory.index, tuple(turns))


def prefixes_of(trajectories: Sequence[Trajectory], count: int, config: Config) -> list[Prefix]:
    """Return the prefixes that the second round of a group continues.

    Args:
        trajectories: Those of the first round, failed services included; not scored.
        count: Number of trajectories of the second round.
        config: The run's config; `reward` and `continuations` are read.

    Returns:
        `count` prefixes, dealt out in turn to the near misses, those with most supporting passages first;
        none if there is no near miss, or with `only_unsolved` if a trajectory is right.
    """
    reward = _answer_alone(config.reward)
    near_misses = []
    for trajectory in trajectories:
        if trajectory.error is not None:
            continue
        score = score_trajectory(trajectory, reward).relative_score
        if score < config.continuations.failed_below:
            near_miss = find_near_miss(trajectory, config.reward)
            if near_miss is not None:
                near_misses.append(near_miss)
        elif config.continuations.only_unsolved:
            return []
    near_misses.sort(key=lambda near_miss: (-near_miss.num_passages, near_miss.trajectory.index))
    if not near_misses:
        return []
    return [near_misses[number % len(near_misses)].prefix() for number in range(count)]


def find_near_miss(trajectory: Trajectory, config: RewardConfig) -> NearMiss | None:
    """Return the near miss of a trajectory that has failed.

    Args:
        trajectory: A finished trajectory.
        config: The section `reward`. With `format`, a turn that breaks the format is no part of a prefix,
            since nothing behind it could be rewarded.

    Returns:
        None if no turn that can be continued found a supporting passage.
    """
    missing = set(trajectory.question.supporting_ids)
    num_passages = len(missing)
    flaws = turn_flaws(trajectory)
    num_turns = 0
    for number, (turn, flaw) in enumerate(zip(trajectory.turns, flaws, strict=True), 1):
        is_broken = bool(flaw) and config.format
        if is_broken or not len(turn.observation_ids):
            break
        # Only what a search returned counts, as in the reward of the evidence.
        shown = {document.id for document in turn.documents} if turn.kind == "search" else set()
        if missing & shown:
            missing -= shown
            num_turns = number
    if not num_turns:
        return None
    return NearMiss(trajectory, num_passages - len(missing), num_turns)


def _answer_alone(config: RewardConfig) -> RewardConfig:
    """Return the reward without what it pays and takes for evidence, searches and length."""
    return replace(
        config,
        evidence=0.0,
        search_cost=0.0,
        overlong_penalty=0.0,
        overlong_from=0,
        overlong_until=0,
    )


def describe_continuations(config: Config) -> list[str]:
    """Describe the second round of a config's groups for the terminal; no line without one."""
    continuations = config.continuations
    if not continuations.is_on:
        return []
    where = "groups without a right trajectory" if continuations.only_unsolved else "all groups"
    return [
        f"second round: {continuations.per_group} of {config.rollout.group_size} trajectories continue near"
        f" misses, in {where}"
    ]
