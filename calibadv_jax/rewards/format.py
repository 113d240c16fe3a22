"""Format validity: does a trajectory keep to the think/search/answer protocol?

Each turn is judged by the text that the policy itself sampled, so that neither a retrieved document nor a
forged observation can change the verdict.
"""

from __future__ import annotations

from calibadv_jax.core.tags import split_at_tags
from calibadv_jax.core.trajectory import Trajectory

_SEARCH_TURN = ("think", "search")
_ANSWER_TURN = ("think", "answer")


def _elements(text: str) -> tuple[str, ...] | None:
    """Names of the elements of `text` in order.

    None unless `text` is a flat run of closed elements with nothing but whitespace between them.
    """
    pieces = split_at_tags(text)
    tags = pieces[1::2]
    if len(tags) % 2 or any(between.strip() for between in pieces[::4]):
        return None
    names = tuple(tag[1:-1] for tag in tags[::2])
    closed = all(tag == f"</{name}>" for name, tag in zip(names, tags[1::2], strict=True))
    return names if closed else None


def is_trajectory_valid(trajectory: Trajectory) -> bool:
    """Whether every turn is what the protocol asks for, judged by sampled text and turn structure.

    Valid: one or more search turns that each sampled exactly think + search and got an observation,
    then one answer turn that sampled exactly think + answer. A protocol tag inside a body (a forged
    observation, a second action) is invalid. The opening that the environment wrote counts as sampled.
    """
    if len(trajectory.turns) < 2:
        return False
    *searches, last = trajectory.turns
    return (
        last.kind == "answer"
        and _elements(trajectory.opening + last.text) == _ANSWER_TURN
        and all(
            turn.kind == "search"
            and len(turn.observation_ids) > 0
            and _elements(trajectory.opening + turn.text) == _SEARCH_TURN
            for turn in searches
        )
    )
