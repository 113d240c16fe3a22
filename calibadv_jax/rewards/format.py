"""Format validity: does a trajectory keep to the protocol of thoughts, actions and an answer?

Each turn is judged by the text that the policy itself sampled, so that neither a retrieved document nor a
forged observation can change the verdict.
"""

from __future__ import annotations

from calibadv_jax.core.tags import Grammar, turn_flaw, whole_turn
from calibadv_jax.core.trajectory import Trajectory


def is_trajectory_valid(trajectory: Trajectory) -> bool:
    """Whether every turn is what the protocol asks for, judged by sampled text and turn structure.

    Valid: one or more turns that each sampled exactly think + the action that was executed and got an
    observation, then one answer turn that sampled exactly think + answer. A protocol tag inside a body (a
    forged observation, a second action) is invalid. The opening that the environment or the prompt wrote
    counts as sampled.
    """
    return not format_flaw(trajectory)


def format_flaw(trajectory: Trajectory) -> str:
    """Return the first reason for which a trajectory is not valid; empty if it is."""
    for number, (turn, flaw) in enumerate(zip(trajectory.turns, turn_flaws(trajectory), strict=True), 1):
        if flaw:
            return f"turn {number}: {flaw}"
        if turn.is_action and not len(turn.observation_ids):
            return f"turn {number}: the action was not executed"
        if turn.kind == "answer" and number < len(trajectory.turns):
            return f"turn {number}: an answer before the last turn"
    if trajectory.answer is None:
        return "the last turn is not an answer"
    return "an answer without any action before it" if len(trajectory.turns) == 1 else ""


def turn_flaws(trajectory: Trajectory) -> list[str]:
    """Return for each turn why it is not exactly a thought and the element of its kind; empty if it is."""
    grammar = Grammar(trajectory.actions)
    return [
        turn_flaw(whole_turn(trajectory.opening_of(number), turn.text), turn.kind, grammar)
        for number, turn in enumerate(trajectory.turns)
    ]
