"""Published ways to give turns credit of their own, in groups of whole trajectories; see docs/credit.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from calibadv_jax.advantages.silver import silver_documents
from calibadv_jax.advantages.steps import Estimate, scored
from calibadv_jax.advantages.turns import (
    ByTurn,
    beside_grpo,
    by_number,
    sampled_turns,
    standardised,
    to_go,
)
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.config.sections.credit import PROBED_BY
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory


def _gigpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Discounted scores, compared among turns before which the environment showed the same."""
    returns, states = [], []
    for trajectory in group.trajectories:
        turns = sampled_turns(trajectory)
        score = np.zeros(len(turns))
        score[-1:] = trajectory.answer_score
        returns.append(to_go(score, config.discount))
        states.append([None, *(turn.observation_ids.tobytes() for turn in turns[:-1])][: len(turns)])
    return standardised(returns, states, config)


def _mt_grpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Whether a golden answer stands in what a turn shows, compared among turns of one number."""
    golden = group.question.golden_answers
    found = [
        [
            float(any(holds_answer(f"{one.title}\n{one.text}", golden) for one in turn.documents))
            for turn in sampled_turns(trajectory)[:-1]
        ]
        for trajectory in group.trajectories
    ]
    return by_number([np.array(one) for one in found], config)


def _stepsearch(group: Group, config: AdvantageConfig) -> ByTurn:
    """Gain less redundancy of a turn and of those after it, compared among turns of one number.

    Wanted are the passages that the question names, or else the silver documents.
    """
    wanted = group.question.supporting_ids or silver_documents(group, config.silver_threshold)
    rewards = [_gain_less_redundancy(one, set(wanted)) for one in group.trajectories]
    return by_number([to_go(one, config.discount) for one in rewards], config)


def _gain_less_redundancy(trajectory: Trajectory, wanted: Collection[str]) -> np.ndarray:
    """By turn: the share of what is wanted that is new, less the share of its documents that are not."""
    seen: set[str] = set()
    rewards = []
    for turn in sampled_turns(trajectory)[:-1]:
        shown = {one.id for one in turn.documents}
        gain = len((shown - seen) & set(wanted)) / max(1, len(wanted))
        rewards.append(gain - len(shown & seen) / max(1, len(shown)))
        seen |= shown
    return np.array(rewards)


def _a2tgpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Gains compared among turns of one number; sums over later turns by the root of their number."""
    gains = by_number([np.diff(np.exp(_known(one, "current"))) for one in group.trajectories], config)
    return [to_go(one, config.discount) / np.sqrt(np.arange(len(one), 0, -1)) for one in gains]


def _tips(group: Group, config: AdvantageConfig) -> ByTurn:
    """How much a turn and those after it raise the potential, compared among turns of one number."""
    gains = [np.diff(_known(one, "initial")) for one in group.trajectories]
    return by_number([to_go(one, config.discount) for one in gains], config)


def igpo(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Gains of all turns and the scores of a group, standardised together, summed over later turns."""
    return [_igpo(group, config) for group in groups]


def _igpo(group: Group, config: AdvantageConfig) -> ByTurn:
    rewards = []
    for trajectory, score in zip(group.trajectories, scored(group).scores, strict=True):
        known = _known(trajectory, "current")
        rewards.append(np.append(np.diff(np.exp(known)), score)[: len(known)])
    spread = standardised(rewards, [[0] * len(one) for one in rewards], config)
    found = [np.zeros(len(one.turns)) for one in group.trajectories]
    for values, own in zip(found, spread, strict=True):
        values[: len(own)] = to_go(own, config.discount)
    return found


def _known(trajectory: Trajectory, policy: str) -> np.ndarray:
    """The golden answer's log-probability before each sampled turn, float64 [n]; up to 0.

    Raises:
        UserError: one is not known.
    """
    found = [turn.golden_logprobs.get(policy) for turn in sampled_turns(trajectory)]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        names = " and ".join(name for name, of in PROBED_BY.items() if of == policy)
        raise UserError(
            f"question {trajectory.question.id!r}: the golden answer's log-probabilities under the {policy}"
            f" policy were not kept, and {names} cannot do without: train with advantage.probes='[{policy}]',"
            " or choose another advantage.name"
        )
    return np.array(known, np.float64)


gigpo = beside_grpo(_gigpo)
mt_grpo = beside_grpo(_mt_grpo)
stepsearch = beside_grpo(_stepsearch)
a2tgpo = beside_grpo(_a2tgpo)
tips = beside_grpo(_tips)
