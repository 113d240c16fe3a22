"""Evidence of kept steps: what the truth and the credit say about every group and every search.

The truth is known where a question names its supporting passages. docs/audit.md defines all terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from calibadv_jax.advantages.credit import GroupCredit, search_turns

# Fields of a group with its blame on truly good and on useless searches before any calibration, each followed
# by the part of that blame that the calibration took away ("spared").
BLAME = ("good_blame", "good_spared", "useless_blame", "useless_spared")
GROUP = np.dtype(
    [
        ("trajectories", "f8"),  # finished trajectories
        ("supporting", "f8"),  # supporting passages of the question
        ("silver", "f8"),  # silver documents
        ("silver_hits", "f8"),  # silver documents that are supporting passages
        ("seen", "f8"),  # documents that the trajectories saw
        ("seen_hits", "f8"),  # seen documents that are supporting passages
        *((name, "f8") for name in BLAME),
    ]
)
SEARCH = np.dtype(
    [
        ("good", "?"),  # truly good: shows a supporting passage that no earlier turn showed
        ("correctness", "f8"),  # NaN where the search is not judged
        ("raw", "f8"),  # advantage before any calibration
        ("advantage", "f8"),  # advantage that is trained
        ("tokens", "i8"),  # sampled tokens of the turn
    ]
)


@dataclass(frozen=True)
class Evidence:
    """Groups whose question names supporting passages, and their searches."""

    groups: np.ndarray  # GROUP [number of groups]
    searches: np.ndarray  # SEARCH [number of searches]


class EvidencePair(NamedTuple):
    """Evidence of the same groups under their own rewards and under those of the control."""

    true: Evidence
    control: Evidence  # the rewards of each step are permuted


@dataclass(frozen=True)
class Variant:
    """The run's own settings with some keys changed, and the evidence of each kept step under them."""

    name: str
    overrides: tuple[str, ...] = ()  # "key.path=value"
    steps: dict[int, EvidencePair] = field(default_factory=dict)  # by the number of the step


def gather(credits: Sequence[GroupCredit]) -> Evidence:
    """Collect the evidence of a step, in the order of its groups that have supporting passages."""
    audited = [credit for credit in credits if credit.group.question.supporting_ids]
    groups = np.zeros(len(audited), GROUP)
    searches_by_group = [np.zeros(0, SEARCH)]
    for credit, group in zip(audited, groups, strict=True):
        searches = np.array(_search_rows(credit), SEARCH)
        searches_by_group.append(searches)
        _fill_group(group, credit, searches)
    return Evidence(groups, np.concatenate(searches_by_group))


def _fill_group(group: np.void, credit: GroupCredit, searches: np.ndarray) -> None:
    """Write the evidence of a group into its row of GROUP."""
    supporting = set(credit.group.question.supporting_ids)
    seen: set[str] = set()
    for trajectory in credit.group.trajectories:
        for turn in trajectory.turns:
            seen.update(document.id for document in turn.documents)
    group["trajectories"] = len(credit.group.trajectories)
    group["supporting"] = len(supporting)
    group["silver"] = len(credit.silver)
    group["silver_hits"] = len(supporting & credit.silver.keys())
    group["seen"] = len(seen)
    group["seen_hits"] = len(supporting & seen)

    negative = searches[searches["raw"] < 0]
    is_good = negative["good"]
    blame = -negative["raw"] * negative["tokens"]
    spared = (negative["advantage"] - negative["raw"]) * negative["tokens"]
    group["good_blame"] = blame[is_good].sum()
    group["good_spared"] = spared[is_good].sum()
    group["useless_blame"] = blame[~is_good].sum()
    group["useless_spared"] = spared[~is_good].sum()


def _search_rows(credit: GroupCredit) -> list[tuple[bool, float, float, float, int]]:
    """Return the searches of a group, each a row with the fields of SEARCH in their order."""
    rows = []
    for position, trajectory in enumerate(credit.group.trajectories):
        is_judged = bool(credit.silver) and trajectory.format_valid
        searches = search_turns(trajectory)
        unseen = set(trajectory.question.supporting_ids)
        for index, turn in enumerate(trajectory.turns):
            hits = unseen & {document.id for document in turn.documents}
            unseen -= hits
            if index not in searches:
                continue
            correctness = credit.correctness[position][index] if is_judged else np.nan
            raw = credit.before[position][index]
            advantage = credit.turns[position][index]
            rows.append((bool(hits), correctness, raw, advantage, len(turn.token_ids)))
    return rows


def join(evidences: Sequence[Evidence]) -> Evidence:
    """Concatenate the groups and the searches, in the order given."""
    groups = np.concatenate([evidence.groups for evidence in evidences])
    searches = np.concatenate([evidence.searches for evidence in evidences])
    return Evidence(groups, searches)


def join_pairs(pairs: Iterable[EvidencePair]) -> EvidencePair:
    """Concatenate the true evidence, and that of the control, in the order given."""
    pairs = list(pairs)
    return EvidencePair(join([pair.true for pair in pairs]), join([pair.control for pair in pairs]))


def pool(*variants: Variant) -> EvidencePair:
    """Return the evidence of all steps of the variants together."""
    return join_pairs(pair for variant in variants for pair in variant.steps.values())
