"""The evidence in the reward: supporting passages that searches return, and searches that were not needed.

That evidence is part of the reward is David-GRPO's idea (arXiv 2601.21699): a small policy that cannot yet
answer learns to search again, since a search that brings one more passage is paid for. Ids come from the
retriever's replies, so that no text of a policy or a document can forge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from calibadv_jax.config import ContinuationsConfig, RewardConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question, Trajectory

NO_CONTINUATIONS = ContinuationsConfig()


@dataclass(frozen=True)
class Evidence:
    """The supporting passages that a trajectory's searches returned, and the searches beyond need.

    Attributes:
        share: Share of the supporting passages that were returned, in [0, 1]; a passage that is returned
            twice counts once.
        extra_searches: Number of searches beyond those that were needed. Needed are those up to the one
            that returns the last supporting passage; while one is missing, as many as there are passages.
    """

    share: float
    extra_searches: int


def find_evidence(trajectory: Trajectory) -> Evidence | None:
    """Return the evidence in a trajectory's searches.

    Args:
        trajectory: a finished trajectory. Its searches count, refused ones too, and no other action.

    Returns:
        The evidence; None if the question names no supporting passages.
    """
    missing = set(trajectory.question.supporting_ids)
    if not missing:
        return None
    num_passages = len(missing)
    num_needed = num_passages
    num_searches = 0
    for turn in trajectory.turns:
        if turn.kind != "search":
            continue
        num_searches += 1
        had_all = not missing
        missing -= {document.id for document in turn.documents}
        if not missing and not had_all:
            num_needed = num_searches
    share = (num_passages - len(missing)) / num_passages
    return Evidence(share, max(0, num_searches - num_needed))


def max_score(supporting_ids: Sequence[str], config: RewardConfig) -> float:
    """Return the largest score of a trajectory: of a right answer, and of all evidence if its ids are named.

    Args:
        supporting_ids: of the question; empty if it names no supporting passages.
        config: the section `reward`.

    Returns:
        The largest answer reward, and `config.evidence` beside it if the question names passages. Neither
        `config.overlong_penalty` nor `config.search_cost` is subtracted.
    """
    if supporting_ids:
        return config.max_score + config.evidence
    return config.max_score


def check_evidence(
    questions: Sequence[Question],
    config: RewardConfig,
    continuations: ContinuationsConfig = NO_CONTINUATIONS,
) -> None:
    """Check that evidence can be seen where the config needs it.

    Args:
        questions: the training questions.
        config: the section `reward`.
        continuations: the section `continuations`.

    Raises:
        UserError: if the evidence is paid for, or decides what is continued, and no question names supporting
            passages.
    """
    names_passages = any(question.supporting_ids for question in questions)
    if continuations.is_on and not names_passages:
        raise UserError(
            "continuations.per_group needs questions that name their supporting passages, and no question of"
            " data.train has supporting_ids: add that column (docs/data.md), or set it to 0"
        )
    if (config.evidence or config.search_cost) and not names_passages:
        raise UserError(
            "reward.evidence and reward.search_cost need questions that name their supporting passages, and"
            " no question of data.train has supporting_ids: add that column (docs/data.md), or set both to 0"
        )
