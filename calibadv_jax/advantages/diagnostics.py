"""Metrics of credit assignment in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from calibadv_jax.advantages.credit import (
    GroupCredit,
    answer_mass,
    last_sampled_turn,
    search_turns,
    two_sides,
)


def summarise(credits: Sequence[GroupCredit]) -> dict[str, float]:
    """Return the metrics of a step. Shares are in [0, 1]; a mean, extreme or ratio over nothing is left out.

    Under "advantage/":
        mean, max, min: over all sampled tokens, as trained on
        groups/: shares of groups that are tied (all scores equal), all wrong (0), all right (1) and
            one-sided (answer-turn advantage of one sign only)
        answer/: sum of the positive and magnitude of the negative advantage over answer-turn tokens,
            and negative / positive, before and after calibration
        search/negative_: magnitude of the negative advantage over search-turn tokens, before and after
        search/softened_share: of the search turns with negative advantage, those that were softened
        correctness/: mean and histogram over the search turns that were judged
        silver/: share of groups with silver documents, mean number of documents in those
        tokens/: number of sampled tokens with positive and negative advantage, by search and answer turns
        skipped_trajectories: number without a sampled token
    """
    parts = (_tokens, _groups, _answers, _searches, _silver)
    return {f"advantage/{name}": value for part in parts for name, value in part(credits).items()}


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {name: float(np.mean(values))} if len(values) else {}


def _groups(credits: Sequence[GroupCredit]) -> dict[str, float]:
    scores = [
        np.array([trajectory.relative_score for trajectory in credit.group.trajectories])
        for credit in credits
        if credit.group.trajectories
    ]
    one_sided = [
        (positive == 0) != (negative == 0)
        for positive, negative in (answer_mass(credit.group, credit.raw.tolist()) for credit in credits)
    ]
    return (
        _mean("groups/all_wrong_share", [float(np.all(group == 0)) for group in scores])
        | _mean("groups/all_right_share", [float(np.all(group >= 1)) for group in scores])
        | _mean("groups/one_sided_share", one_sided)
    )


def _answers(credits: Sequence[GroupCredit]) -> dict[str, float]:
    before = [answer_mass(credit.group, credit.raw.tolist()) for credit in credits]
    after = [answer_mass(credit.group, credit.answer_advantages()) for credit in credits]
    metrics = {}
    for when, masses in (("before", before), ("after", after)):
        positive, negative = (math.fsum(side) for side in zip(*masses, strict=True)) if masses else (0.0, 0.0)
        metrics[f"answer/positive_{when}"] = positive
        metrics[f"answer/negative_{when}"] = negative
        if positive > 0:
            metrics[f"answer/ratio_{when}"] = negative / positive
    return metrics


def _searches(credits: Sequence[GroupCredit]) -> dict[str, float]:
    judged: list[float] = []
    softened: list[bool] = []
    masses: dict[str, list[float]] = {"before": [], "after": []}
    for credit in credits:
        for trajectory, before, turns, correctness in zip(
            credit.group.trajectories, credit.before, credit.turns, credit.correctness, strict=True
        ):
            searches = search_turns(trajectory)
            lengths = [len(turn.token_ids) for turn in trajectory.turns]
            masses["before"] += [before[index] * lengths[index] for index in searches]
            masses["after"] += [turns[index] * lengths[index] for index in searches]
            softened += [turns[index] > before[index] for index in searches if before[index] < 0]
            if credit.silver and trajectory.format_valid:
                judged += correctness[searches].tolist()
    values = np.array(judged)
    bins = {
        "zero": values == 0,
        "to_one_third": (values > 0) & (values <= 1 / 3),
        "to_two_thirds": (values > 1 / 3) & (values <= 2 / 3),
        "to_one": values > 2 / 3,
    }
    metrics = _mean("search/softened_share", softened) | _mean("correctness/mean", values)
    metrics |= {f"search/negative_{when}": two_sides(of_turns)[1] + 0.0 for when, of_turns in masses.items()}
    for name, members in bins.items():
        metrics |= _mean(f"correctness/{name}_share", members)
    return metrics


def _silver(credits: Sequence[GroupCredit]) -> dict[str, float]:
    sizes = [len(credit.silver) for credit in credits]
    return _mean("silver/group_share", [size > 0 for size in sizes]) | _mean(
        "silver/size_mean", [size for size in sizes if size]
    )


def _tokens(credits: Sequence[GroupCredit]) -> dict[str, float]:
    places = ("search_positive", "search_negative", "answer_positive", "answer_negative")
    counts = dict.fromkeys((f"tokens/{place}" for place in places), 0.0)
    values: list[float] = []
    lengths: list[int] = []
    skipped = 0
    for credit in credits:
        for trajectory, turns in zip(credit.group.trajectories, credit.turns, strict=True):
            last = last_sampled_turn(trajectory)
            skipped += last is None
            for index, advantage in enumerate(turns[: 0 if last is None else last + 1].tolist()):
                values.append(advantage)
                lengths.append(len(trajectory.turns[index].token_ids))
                if advantage != 0:
                    place = "answer" if index == last else "search"
                    sign = "positive" if advantage > 0 else "negative"
                    counts[f"tokens/{place}_{sign}"] += lengths[-1]
    counts["skipped_trajectories"] = float(skipped)
    sampled = [value for value, length in zip(values, lengths, strict=True) if length]
    if sampled:
        mean = float(np.average(values, weights=lengths))
        counts |= {"mean": mean, "max": max(sampled), "min": min(sampled)}
    return counts
