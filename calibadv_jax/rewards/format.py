"""Format validity: does a response keep to the think/search/answer protocol?

Two views share one tag scanner. The trajectory view judges each turn by the text the policy itself
sampled, so that neither a retrieved document nor a forged observation can change the verdict; it is
the one rewards use. The text view judges a whole decoded response as the CalibAdv authors do, for
responses whose turns are not known.
"""

from __future__ import annotations

import re

from calibadv_jax.trajectory import Trajectory

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_END_OF_TEXT = "<|endoftext|>"
_INVALID_ACTION = "My previous action is invalid."
_SEARCH_TURN = ("think", "search")
_ANSWER_TURN = ("think", "answer")
_ROUND = ("think", "search", "information")


def _elements(text: str) -> tuple[str, ...] | None:
    """Names of the elements of `text` in order.

    None unless `text` is a flat run of closed elements with nothing but whitespace between them.
    """
    pieces = _TAG.split(text)  # text, tag, text, tag, …, text
    tags = pieces[1::2]
    if len(tags) % 2 or any(between.strip() for between in pieces[::4]):
        return None
    names = tuple(tag[1:-1] for tag in tags[::2])
    closed = all(tag == f"</{name}>" for name, tag in zip(names, tags[1::2], strict=True))
    return names if closed else None


def is_format_valid(response: str) -> bool:
    """Whether a decoded response is (think search information)+ think answer.

    Only whitespace may stand between the elements, bodies may be empty but hold no protocol tag, and
    the environment's reproach for an invalid action may occur nowhere.
    """
    if _INVALID_ACTION in response:
        return False
    names = _elements(response.replace(_END_OF_TEXT, ""))
    if names is None or names[-2:] != _ANSWER_TURN:
        return False
    rounds = len(names) // len(_ROUND)
    return rounds >= 1 and names[:-2] == _ROUND * rounds


def extract_answer(response: str) -> str | None:
    """Body of the last closed answer element of a decoded response, stripped; None if there is none.

    An opening tag inside an open answer belongs to its body.
    """
    pieces = _TAG.split(response)
    answer, start = None, None
    for position in range(1, len(pieces), 2):
        if pieces[position] == "<answer>" and start is None:
            start = position + 1
        elif pieces[position] == "</answer>" and start is not None:
            answer, start = "".join(pieces[start:position]).strip(), None
    return answer


def is_trajectory_valid(trajectory: Trajectory, prepend_think: bool) -> bool:
    """Whether every turn is what the protocol asks for, judged by sampled text and turn structure.

    Valid: one or more search turns that each sampled exactly think + search and got an observation,
    then one answer turn that sampled exactly think + answer. A protocol tag inside a body (a forged
    observation, a second action) is invalid. With `prepend_think` the environment wrote the opening
    think tag of every turn.
    """
    opening = "<think>" if prepend_think else ""
    if len(trajectory.turns) < 2:
        return False
    *searches, last = trajectory.turns
    return (
        last.kind == "answer"
        and _elements(opening + last.text) == _ANSWER_TURN
        and all(
            turn.kind == "search"
            and len(turn.observation_ids) > 0
            and _elements(opening + turn.text) == _SEARCH_TURN
            for turn in searches
        )
    )
