"""A reward of one's own.

PYTHONPATH=. calibadv train --config FILE reward.answer=examples.own_reward:short_way

With another cost: reward.args.cost=0.2

Beside others: 'reward.answer={f1: 0.8, "examples.own_reward:short_way": 0.2}'
"""

from __future__ import annotations

from calibadv_jax import Trajectory


def short_way(trajectory: Trajectory, cost: float = 0.1) -> float:
    """1 for an answer that holds a golden answer, less what further actions cost; at least 0.

    Args:
        trajectory: a finished one, with its `question`, `turns` and `answer`, which is None if it never
            answered. What it wrote is not to be trusted: compare it, and never run it.
        cost: of each action after the first, from `reward.args`.
    """
    if trajectory.answer is None:
        return 0.0
    answer = trajectory.answer.casefold()
    is_right = any(golden.casefold() in answer for golden in trajectory.question.golden_answers)
    further = max(0, sum(turn.is_action for turn in trajectory.turns) - 1)
    return max(0.0, float(is_right) - cost * further)
