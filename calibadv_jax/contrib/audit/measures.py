"""Numbers that compare credit with the truth, and what each of them means."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.stats import rankdata

from calibadv_jax.contrib.audit.evidence import Evidence

# Measure -> its meaning, for a reader of the tables. docs/audit.md has the definitions.
MEASURES = {
    "silver/group_share": "groups that have a silver set",
    "silver/size": "documents of a silver set",
    "silver/precision": "silver documents that are supporting",
    "silver/recall": "supporting passages that are silver",
    "silver/seen_precision": "the same groups: documents seen that are supporting",
    "silver/seen_recall": "the same groups: supporting passages that were seen",
    "search/good_share": "searches that are truly good",
    "search/judged_share": "searches that are judged",
    "search/judged_good_share": "judged searches that are truly good",
    "search/precision": "judged, correctness > 0: truly good",
    "search/recall": "judged, truly good: correctness > 0",
    "search/agreement": "judged: correctness > 0 agrees with the truth",
    "search/auc": "judged: area under the ROC curve of correctness",
    "blame/good_blamed": "truly good searches that are blamed, uncalibrated",
    "blame/good_share": "blamed searches that are truly good",
    "blame/good_spared": "blame on truly good ones that is taken away",
    "blame/useless_spared": "blame on useless ones that is taken away",
    "blame/spared_good_share": "blame taken away that lay on truly good ones",
}
# Measures of the table over training, one column each.
OVER_TRAINING = (
    "silver/group_share",
    "silver/precision",
    "search/precision",
    "blame/good_blamed",
    "blame/good_spared",
    "blame/useless_spared",
)
# Verdict on an estimator -> its meaning.
VERDICTS = {
    "good blamed": "truly good searches with a negative advantage",
    "useless praised": "useless searches with a positive advantage",
    "blame on good": "of the negative advantage × tokens of searches, that on truly good ones",
    "praise on useless": "of the positive one, that on useless ones",
    "agreement": "searches whose advantage has the sign that CalibAdv gives it",
}


def measure(evidence: Evidence) -> dict[str, float]:
    """Compute MEASURES, after the numbers of groups, trajectories, searches and blamed searches.

    Measures of silver documents are means over the groups with a silver set. ``search/auc`` is the chance
    that a truly good search has a larger correctness than a useless one, where a tie counts half. A mean,
    share or ratio whose denominator is 0 is omitted.
    """
    counts: dict[str, float] = {
        "groups": len(evidence.groups),
        "trajectories": int(evidence.groups["trajectories"].sum()),
        "searches": len(evidence.searches),
        "blamed": int((evidence.searches["raw"] < 0).sum()),
    }
    measures = _silver_measures(evidence) | _search_measures(evidence) | _blame_measures(evidence)
    return counts | _defined(measures)


def _silver_measures(evidence: Evidence) -> dict[str, float | None]:
    groups = evidence.groups
    silver = groups[groups["silver"] > 0]
    return {
        "silver/group_share": _mean(groups["silver"] > 0),
        "silver/size": _mean(silver["silver"]),
        "silver/precision": _mean(silver["silver_hits"] / silver["silver"]),
        "silver/recall": _mean(silver["silver_hits"] / silver["supporting"]),
        "silver/seen_precision": _mean(silver["seen_hits"] / silver["seen"]),
        "silver/seen_recall": _mean(silver["seen_hits"] / silver["supporting"]),
    }


def _search_measures(evidence: Evidence) -> dict[str, float | None]:
    searches = evidence.searches
    is_judged = ~np.isnan(searches["correctness"])
    judged = searches[is_judged]
    is_good = judged["good"]
    is_called_good = judged["correctness"] > 0
    return {
        "search/good_share": _mean(searches["good"]),
        "search/judged_share": _mean(is_judged),
        "search/judged_good_share": _mean(is_good),
        "search/precision": _mean(is_good[is_called_good]),
        "search/recall": _mean(is_called_good[is_good]),
        "search/agreement": _mean(is_good == is_called_good),
        "search/auc": _area_under_curve(judged["correctness"], is_good),
    }


def _area_under_curve(scores: np.ndarray, is_positive: np.ndarray) -> float | None:
    """Return the area under the ROC curve: Mann-Whitney's U of the positives over the number of pairs."""
    num_positive = int(is_positive.sum())
    num_negative = len(is_positive) - num_positive
    rank_sum = float(rankdata(scores)[is_positive].sum())
    u = rank_sum - num_positive * (num_positive + 1) / 2
    return _ratio(u, num_positive * num_negative)


def _blame_measures(evidence: Evidence) -> dict[str, float | None]:
    searches = evidence.searches
    blamed = searches[searches["raw"] < 0]
    good_blame = evidence.groups["good_blame"].sum()
    good_spared = evidence.groups["good_spared"].sum()
    useless_blame = evidence.groups["useless_blame"].sum()
    useless_spared = evidence.groups["useless_spared"].sum()
    return {
        "blame/good_blamed": _mean(searches["raw"][searches["good"]] < 0),
        "blame/good_share": _mean(blamed["good"]),
        "blame/good_spared": _ratio(good_spared, good_blame),
        "blame/useless_spared": _ratio(useless_spared, useless_blame),
        "blame/spared_good_share": _ratio(good_spared, good_spared + useless_spared),
    }


def verdicts(evidence: Evidence, calibadv: Evidence) -> dict[str, float]:
    """Compute VERDICTS on the trained advantages of searches.

    Args:
        evidence: the searches under the estimator that is judged.
        calibadv: the same searches, in the same order, under CalibAdv.

    Returns:
        Verdict -> share. A verdict without anything to judge is omitted.
    """
    advantage = evidence.searches["advantage"]
    is_good = evidence.searches["good"]
    mass = advantage * evidence.searches["tokens"]
    negative = np.maximum(-mass, 0)
    positive = np.maximum(mass, 0)
    has_same_sign = np.sign(advantage) == np.sign(calibadv.searches["advantage"])
    return _defined(
        {
            "good blamed": _mean(advantage[is_good] < 0),
            "useless praised": _mean(advantage[~is_good] > 0),
            "blame on good": _ratio(negative[is_good].sum(), negative.sum()),
            "praise on useless": _ratio(positive[~is_good].sum(), positive.sum()),
            "agreement": _mean(has_same_sign),
        }
    )


def _mean(values: np.ndarray) -> float | None:
    return _ratio(values.sum(), len(values))


def _ratio(numerator: float, denominator: float) -> float | None:
    """Return the ratio; None where the denominator is 0."""
    if denominator > 0:
        return float(numerator / denominator)
    return None


def _defined(measures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the measures without those that are None."""
    return {name: value for name, value in measures.items() if value is not None}
