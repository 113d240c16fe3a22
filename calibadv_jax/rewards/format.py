"""Format validity: does a trajectory keep to the protocol of thoughts, actions and an answer?

Each turn is judged by the text that the policy itself sampled, so that neither a retrieved document nor a
forged observation can change the verdict.
"""

from __future__ import annotations

from calibadv_jax.core.tags import Grammar, split_at_tags, whole_turn
from calibadv_jax.core.trajectory import Trajectory


def _elements(text: str, grammar: Grammar) -> tuple[str, ...] | None:
    """Names of the elements of `text` in order.

    None unless `text` is a flat run of closed elements with nothing but whitespace between them.
    """
    pieces = split_at_tags(text, grammar)
    tags = pieces[1::2]
    if len(tags) % 2 or any(between.strip() for between in pieces[::4]):
        return None
    names = tuple(tag[1:-1] for tag in tags[::2])
    closed = all(tag == f"</{name}>" for name, tag in zip(names, tags[1::2], strict=True))
    return names if closed else None


def is_trajectory_valid(trajectory: Trajectory) -> bool:
    """Whether every turn is what the protocol asks for, judged by sampled text and turn structure.

    Valid: one or more turns that each sampled exactly think + the action that was executed and got an
    observation, then one answer turn that sampled exactly think + answer. A protocol tag inside a body (a
    forged observation, a second action) is invalid. The opening that the environment or the prompt wrote
    counts as sampled.
    """
    if len(trajectory.turns) < 2:
        return False
    grammar = Grammar(trajectory.actions)
    *before, last = trajectory.turns
    return (
        last.kind == "answer"
        and all(turn.is_action and len(turn.observation_ids) > 0 for turn in before)
        and all(
            _elements(whole_turn(trajectory.opening_of(number), turn.text), grammar) == ("think", turn.kind)
            for number, turn in enumerate(trajectory.turns)
        )
    )
