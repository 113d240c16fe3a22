"""Credit against the truth, where questions name their supporting passages.

A search is truly good if it shows a supporting passage that no earlier turn of its trajectory showed, else
truly useless. Searches are the search turns before a trajectory's last sampled turn, CalibAdv's answer turn.
Blame is negative advantage × sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from scipy.stats import rankdata

from calibadv_jax.advantages.credit import GroupCredit, answer_mass, search_turns
from calibadv_jax.core.trajectory import Trajectory

_COUNTS = ("trajectories", "supporting", "silver", "silver_hits", "seen", "seen_hits")
_MASSES = ("positive_before", "negative_before", "positive_after", "negative_after")  # credit.answer_mass
BLAME = ("good_blame", "good_spared", "useless_blame", "useless_spared")
# Of a group: finished trajectories; supporting passages of its question; silver documents and the documents
# seen, with the supporting ones of each; answer mass before and after the calibration; blame on truly good
# and on useless searches before any calibration, with the part of it that the calibration took away.
GROUP = np.dtype([(name, np.int64) for name in _COUNTS] + [(name, np.float64) for name in (*_MASSES, *BLAME)])
SEARCH = np.dtype(
    [
        ("good", np.bool_),
        ("judged", np.bool_),  # the group has silver documents, and the trajectory keeps to the format
        ("correctness", np.float64),
        ("raw", np.float64),  # advantage before any calibration
        ("advantage", np.float64),
        ("tokens", np.int64),  # sampled ones
    ]
)
_NAMES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MEASURES: dict[str, str] = _NAMES["measures"]
VERDICTS: dict[str, str] = _NAMES["verdicts"]
OVER_TRAINING: list[str] = _NAMES["over_training"]


@dataclass(frozen=True)
class Evidence:
    """Groups whose question names supporting passages, and their searches."""

    groups: np.ndarray  # GROUP [number of groups]
    searches: np.ndarray  # SEARCH [number of searches]


def truly_good(trajectory: Trajectory) -> list[bool]:
    """Return whether each turn shows a supporting passage that no earlier turn showed, length K."""
    missing = set(trajectory.question.supporting_ids)
    good = []
    for turn in trajectory.turns:
        supporting = missing & {document.id for document in turn.documents}
        missing -= supporting
        good.append(bool(supporting))
    return good


def gather(credits: Sequence[GroupCredit]) -> Evidence:
    """Collect the evidence of a step, in the order of its groups that have supporting passages."""
    measurable = [credit for credit in credits if credit.group.question.supporting_ids]
    searches = [np.array(_searches(credit), SEARCH) for credit in measurable]
    groups = [_group(credit, own) for credit, own in zip(measurable, searches, strict=True)]
    return Evidence(np.array(groups, GROUP), np.concatenate([np.zeros(0, SEARCH), *searches]))


def join(parts: Iterable[Evidence]) -> Evidence:
    """Join the evidence of several steps, at least one."""
    groups, searches = zip(*((part.groups, part.searches) for part in parts), strict=True)
    return Evidence(np.concatenate(groups), np.concatenate(searches))


def measure(evidence: Evidence) -> dict[str, float]:
    """Compute MEASURES, after the numbers of groups, trajectories, searches and blamed searches.

    Those of silver documents are means over the groups with some; auc is the chance that a truly good search
    has the larger correctness, ties counting half. Means, shares and ratios of nothing are omitted.
    """
    searches = evidence.searches
    counts = {
        "groups": len(evidence.groups),
        "trajectories": int(evidence.groups["trajectories"].sum()),
        "searches": len(searches),
        "blamed": int((searches["raw"] < 0).sum()),
    }
    groups = evidence.groups
    return counts | _silver(groups) | _judgements(searches) | _blame(searches) | _answers(groups)


def verdicts(evidence: Evidence, calibadv: Evidence) -> dict[str, float]:
    """Compute VERDICTS on the trained advantages, given those of the same searches under CalibAdv."""
    searches = evidence.searches
    good, advantage = searches["good"], searches["advantage"]
    mass = advantage * searches["tokens"]
    negative, positive = np.maximum(-mass, 0), np.maximum(mass, 0)
    return (
        _share("good blamed", advantage[good] < 0)
        | _share("useless praised", advantage[~good] > 0)
        | _ratio("blame on good", float(negative[good].sum()), float(negative.sum()))
        | _ratio("praise on useless", float(positive[~good].sum()), float(positive.sum()))
        | _share("agreement", np.sign(advantage) == np.sign(calibadv.searches["advantage"]))
    )


def _group(credit: GroupCredit, searches: np.ndarray) -> tuple[float, ...]:
    members = credit.group.trajectories
    supporting = set(credit.group.question.supporting_ids)
    seen = {document.id for member in members for turn in member.turns for document in turn.documents}
    return (
        len(members),
        len(supporting),
        len(credit.silver),
        len(supporting & credit.silver.keys()),
        len(seen),
        len(supporting & seen),
        *answer_mass(credit.group, credit.raw.tolist()),
        *answer_mass(credit.group, credit.answer_advantages()),
        *_blame_sums(searches),
    )


def _blame_sums(searches: np.ndarray) -> Iterator[float]:
    """Yield blame and the spared part of it, of truly good and then of useless searches."""
    for good in (True, False):
        negative = searches[(searches["raw"] < 0) & (searches["good"] == good)]
        yield float(-(negative["raw"] * negative["tokens"]).sum())
        yield float(((negative["advantage"] - negative["raw"]) * negative["tokens"]).sum())


def _searches(credit: GroupCredit) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for position, trajectory in enumerate(credit.group.trajectories):
        good = truly_good(trajectory)
        judged = bool(credit.silver) and trajectory.format_valid
        for index in search_turns(trajectory):
            correctness = credit.correctness[position][index]
            advantages = credit.before[position][index], credit.turns[position][index]
            tokens = len(trajectory.turns[index].token_ids)
            rows.append((good[index], judged, correctness, *advantages, tokens))
    return rows


def _share(name: str, values: np.ndarray) -> dict[str, float]:
    return {name: float(np.mean(values))} if len(values) else {}


def _ratio(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole > 0 else {}


def _silver(groups: np.ndarray) -> dict[str, float]:
    some = groups[groups["silver"] > 0]
    return (
        _share("silver/group_share", groups["silver"] > 0)
        | _share("silver/size", some["silver"])
        | _share("silver/precision", some["silver_hits"] / some["silver"])
        | _share("silver/recall", some["silver_hits"] / some["supporting"])
        | _share("silver/seen_precision", some["seen_hits"] / some["seen"])
        | _share("silver/seen_recall", some["seen_hits"] / some["supporting"])
    )


def _judgements(searches: np.ndarray) -> dict[str, float]:
    judged = searches[searches["judged"]]
    good, called = judged["good"], judged["correctness"] > 0
    num_good = int(good.sum())
    ranks = rankdata(judged["correctness"])[good]
    u = float(ranks.sum()) - num_good * (num_good + 1) / 2  # Mann-Whitney's, of the good searches
    return (
        _share("search/good_share", searches["good"])
        | _share("search/judged_share", searches["judged"])
        | _share("search/judged_good_share", good)
        | _share("search/precision", good[called])
        | _share("search/recall", called[good])
        | _share("search/agreement", good == called)
        | _ratio("search/auc", u, num_good * (len(good) - num_good))
    )


def _blame(searches: np.ndarray) -> dict[str, float]:
    negative = searches[searches["raw"] < 0]
    good = negative["good"]
    softened = negative["advantage"] > negative["raw"]
    before = -negative["raw"] * negative["tokens"]
    spared = before + negative["advantage"] * negative["tokens"]
    return (
        _share("blame/good_blamed", searches["raw"][searches["good"]] < 0)
        | _share("blame/good_share", good)
        | _share("blame/good_softened", softened[good])
        | _share("blame/useless_softened", softened[~good])
        | _ratio("blame/good_spared", float(spared[good].sum()), float(before[good].sum()))
        | _ratio("blame/useless_spared", float(spared[~good].sum()), float(before[~good].sum()))
        | _ratio("blame/spared_good_share", float(spared[good].sum()), float(spared.sum()))
    )


def _answers(groups: np.ndarray) -> dict[str, float]:
    sums = {name: float(groups[name].sum()) for name in _MASSES}
    before = _ratio("answer/ratio_before", sums["negative_before"], sums["positive_before"])
    return before | _ratio("answer/ratio_after", sums["negative_after"], sums["positive_after"])
