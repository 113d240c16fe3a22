"""Trajectories as JSON, for rollouts/step_N.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.trajectory import Group, Trajectory


def write_rollouts(path: Path, groups: Sequence[Group]) -> None:
    """Writes a step's trajectories, one a line; the folder is made when missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            for trajectory in group.trajectories:
                file.write(json.dumps(trajectory_to_json(trajectory), ensure_ascii=False) + "\n")


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The fields of a trajectory that a person reads, and the token counts."""
    return {
        "question": trajectory.question.text,
        "question_id": trajectory.question.id,
        "data_source": trajectory.question.data_source,
        "golden_answers": list(trajectory.question.golden_answers),
        "index": trajectory.index,
        "error": trajectory.error,
        "answer": trajectory.answer,
        "answer_score": trajectory.answer_score,
        "format_valid": trajectory.format_valid,
        "metrics": trajectory.metrics,
        "policy_versions": list(trajectory.policy_versions),
        "num_prompt_tokens": len(trajectory.prompt_ids),
        "seconds": round(trajectory.seconds, 3),
        "turns": [
            {
                "kind": turn.kind,
                "text": turn.text,
                "stop_reason": turn.stop_reason,
                "query": turn.query,
                "num_tokens": len(turn.token_ids),
                "documents": [{"id": d.id, "title": d.title, "text": d.text} for d in turn.documents],
                "observation": turn.observation_text,
                "num_observation_tokens": len(turn.observation_ids),
            }
            for turn in trajectory.turns
        ],
    }
