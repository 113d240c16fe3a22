"""Credit against the truth, where questions name their supporting passages.

A search is truly good if it shows a supporting passage that no earlier turn of its trajectory showed, else
truly useless. Searches are the search turns before a trajectory's last sampled turn, CalibAdv's answer turn.
Blame is negative advantage × sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    groups, searches = evidence.groups, evidence.searches
    silver, judged = groups[groups["silver"] > 0], searches[searches["judged"]]
    is_good, called = judged["good"], judged["correctness"] > 0
    num_good = int(is_good.sum())
    ranks = rankdata(judged["correctness"])[is_good]
    u = float(ranks.sum()) - num_good * (num_good + 1) / 2  # Mann-Whitney's, of the good searches
    blamed = searches[searches["raw"] < 0]
    good, softened = blamed["good"], blamed["advantage"] > blamed["raw"]
    before = -blamed["raw"] * blamed["tokens"]
    spared = before + blamed["advantage"] * blamed["tokens"]
    masses = {name: float(groups[name].sum()) for name in _MASSES}
    means = {
        "silver/group_share": groups["silver"] > 0,
        "silver/size": silver["silver"],
        "silver/precision": silver["silver_hits"] / silver["silver"],
        "silver/recall": silver["silver_hits"] / silver["supporting"],
        "silver/seen_precision": silver["seen_hits"] / silver["seen"],
        "silver/seen_recall": silver["seen_hits"] / silver["supporting"],
        "search/good_share": searches["good"],
        "search/judged_share": searches["judged"],
        "search/judged_good_share": is_good,
        "search/precision": is_good[called],
        "search/recall": called[is_good],
        "search/agreement": is_good == called,
        "blame/good_blamed": searches["raw"][searches["good"]] < 0,
        "blame/good_share": good,
        "blame/good_softened": softened[good],
        "blame/useless_softened": softened[~good],
    }
    ratios = {
        "search/auc": (u, num_good * (len(is_good) - num_good)),
        "blame/good_spared": (spared[good].sum(), before[good].sum()),
        "blame/useless_spared": (spared[~good].sum(), before[~good].sum()),
        "blame/spared_good_share": (spared[good].sum(), spared.sum()),
        "answer/ratio_before": (masses["negative_before"], masses["positive_before"]),
        "answer/ratio_after": (masses["negative_after"], masses["positive_after"]),
    }
    counts = {"groups": len(groups), "trajectories": int(groups["trajectories"].sum())}
    counts |= {"searches": len(searches), "blamed": len(blamed)}
    values = _values(means, ratios)
    return counts | {name: values[name] for name in MEASURES if name in values}


def _values(means: Mapping[str, np.ndarray], ratios: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return means and ratios, without those of nothing."""
    of_some = {name: float(np.mean(values)) for name, values in means.items() if len(values)}
    return of_some | {name: float(part) / float(whole) for name, (part, whole) in ratios.items() if whole > 0}


def verdicts(evidence: Evidence, calibadv: Evidence) -> dict[str, float]:
    """Compute VERDICTS on the trained advantages, given those of the same searches under CalibAdv."""
    searches = evidence.searches
    good, advantage = searches["good"], searches["advantage"]
    mass = advantage * searches["tokens"]
    negative, positive = np.maximum(-mass, 0), np.maximum(mass, 0)
    signs = np.sign(advantage) == np.sign(calibadv.searches["advantage"])
    means = {"good blamed": advantage[good] < 0, "useless praised": advantage[~good] > 0, "agreement": signs}
    ratios = {
        "blame on good": (negative[good].sum(), negative.sum()),
        "praise on useless": (positive[~good].sum(), positive.sum()),
    }
    values = _values(means, ratios)
    return {name: values[name] for name in VERDICTS if name in values}


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
