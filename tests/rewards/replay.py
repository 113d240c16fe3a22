"""A decoded response as the turns that the agent loop would have written."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from calibadv_jax.core.tags import STOP_STRINGS, parse_turn
from calibadv_jax.core.trajectory import Question, Trajectory, Turn

SEGMENT = re.compile(rf".*?(?:{'|'.join(STOP_STRINGS)})", re.DOTALL)
OBSERVATION = re.compile(r"\s*<information>.*?</information>\s*", re.DOTALL)


def replay(response: str, golden_answers: Sequence[str]) -> Trajectory:
    """Turns end where sampling stops; an information block after a search is the environment's.

    Text after an answer is taken for the rest of the token that closed it; end-of-text is not read.
    """
    trajectory = Trajectory(Question("q", "?", tuple(golden_answers), "test"), np.zeros(1, np.int32))
    remaining = response.removesuffix("<|endoftext|>")
    while remaining:
        segment = SEGMENT.match(remaining)
        text = remaining if segment is None else segment.group()
        remaining = remaining[len(text) :]
        parsed = parse_turn(text, stop_reason="eos" if segment is None else "stop")
        shown = OBSERVATION.match(remaining) if parsed.kind == "search" else None
        num_observed = 0 if shown is None else shown.end()
        remaining = remaining[num_observed:]
        if parsed.kind == "answer":
            text, remaining = text + remaining, ""
        turn = Turn(parsed.kind, np.zeros(3, np.int32), np.zeros(3, np.float32), text, parsed.think)
        turn.query, turn.answer = parsed.query, parsed.answer
        turn.observation_ids = np.zeros(num_observed, np.int32)
        trajectory.turns.append(turn)
    return trajectory
