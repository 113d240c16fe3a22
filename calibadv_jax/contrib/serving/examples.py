"""Example questions for the page: questions that the served policy was trained on."""

from __future__ import annotations

from pathlib import Path

from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.rollout_store.reader import read_columns
from calibadv_jax.rollout_store.schema import kept_steps

NUM_EXAMPLES = 4
LONGEST_EXAMPLE = 140  # letters; longer questions are no examples
RUN_DEPTH = 2  # folders above a policy among which its run is sought


def example_questions(policy: Path) -> list[str]:
    """Return questions of the newest kept step of the policy's run, those with the best answers first.

    Nothing outside the folder of the run is read.

    Args:
        policy: the folder that was named: a run, its checkpoints, or one of them.

    Returns:
        At most NUM_EXAMPLES questions; empty without kept trajectories.

    Raises:
        UserError: the file of the step cannot be read.
    """
    folders = [policy, *policy.absolute().parents[:RUN_DEPTH]]
    for folder in folders:
        steps = kept_steps(folder)
        if steps:
            return _best_questions(steps[max(steps)])
    return []


def _best_questions(path: Path) -> list[str]:
    """Return the questions of a kept step with the highest mean scores."""
    rows = read_columns(path, ["question", "answer_score"]).to_pylist()
    scores: dict[str, list[float]] = {}
    for row in rows:
        text = to_printable_line(row["question"])
        if 0 < len(text) <= LONGEST_EXAMPLE:
            scores.setdefault(text, []).append(row["answer_score"] or 0.0)
    means = {text: sum(values) / len(values) for text, values in scores.items()}
    ranked = sorted(means, key=lambda text: -means[text])
    return ranked[:NUM_EXAMPLES]
