"""Metrics of a step's advantages: signs, sums and correctness, before and after the calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.advantages.credit import (
    GroupCredit,
    answer_turn_sums,
    last_sampled_turn,
    positive_negative_sums,
    sampled_turns,
)


def advantage_metrics(credits: Sequence[GroupCredit]) -> dict[str, float]:
    """Return the metrics of a step's advantages.

    Args:
        credits: the calibrated credit of each group of the step.

    Returns:
        Values by their names in `metrics/catalogue.yaml`, which begin with ``advantage/``. A mean, share or
        ratio over nothing is left out.
    """
    metrics = _turn_metrics(credits)
    metrics.update(_group_metrics(credits))
    return {f"advantage/{name}": value for name, value in metrics.items()}


def _add_mean(metrics: dict[str, float], name: str, values: Sequence[float] | np.ndarray) -> None:
    """Add the mean of the values, or nothing if there are none."""
    if len(values):
        metrics[name] = float(np.mean(values))


# --- Groups ---


def _group_metrics(credits: Sequence[GroupCredit]) -> dict[str, float]:
    groups = [credit.group.trajectories for credit in credits if credit.group.trajectories]
    is_all_wrong = []
    is_all_right = []
    for group in groups:
        scores = [trajectory.relative_score for trajectory in group]
        is_all_wrong.append(all(score == 0 for score in scores))
        is_all_right.append(all(score >= 1 for score in scores))
    sums_before = []
    sums_after = []
    for credit in credits:
        sums_before.append(answer_turn_sums(credit.group, credit.raw.tolist()))
        sums_after.append(answer_turn_sums(credit.group, credit.answer_advantages()))
    is_one_sided = [(positive == 0) != (negative == 0) for positive, negative in sums_before]
    silver_sizes = [len(credit.silver) for credit in credits]
    metrics: dict[str, float] = {}
    _add_mean(metrics, "groups/all_wrong_share", is_all_wrong)
    _add_mean(metrics, "groups/all_right_share", is_all_right)
    _add_mean(metrics, "groups/one_sided_share", is_one_sided)
    _add_mean(metrics, "silver/group_share", [size > 0 for size in silver_sizes])
    _add_mean(metrics, "silver/size_mean", [size for size in silver_sizes if size])
    _add_answer_sums(metrics, "before", sums_before)
    _add_answer_sums(metrics, "after", sums_after)
    return metrics


def _add_answer_sums(metrics: dict[str, float], when: str, sums: Sequence[tuple[float, float]]) -> None:
    """Add the step's sums of advantage over the answer turns, given those of each group."""
    positive = math.fsum(group_positive for group_positive, _ in sums)
    negative = math.fsum(group_negative for _, group_negative in sums)
    metrics[f"answer/positive_{when}"] = positive
    metrics[f"answer/negative_{when}"] = negative
    if positive > 0:
        metrics[f"answer/ratio_{when}"] = negative / positive


# --- Turns ---


@dataclass(frozen=True)
class _TurnColumns:
    """The N turns of a step up to each trajectory's last sampled one, as columns."""

    is_answer: np.ndarray  # bool [N]: the trajectory's last sampled turn
    is_search: np.ndarray  # bool [N]: an action before it
    is_judged: np.ndarray  # bool [N]: its trajectory is valid, and its group has silver documents
    num_tokens: np.ndarray  # float64 [N]: sampled tokens
    before: np.ndarray  # float64 [N]: advantage before the calibration
    after: np.ndarray  # float64 [N]: advantage after the calibration
    correctness: np.ndarray  # float64 [N]


def _turn_columns(credits: Sequence[GroupCredit]) -> _TurnColumns:
    is_answer = []
    is_search = []
    is_judged = []
    num_tokens = []
    before = []
    after = []
    correctness = []
    for credit in credits:
        for position, trajectory in enumerate(credit.group.trajectories):
            last = last_sampled_turn(trajectory)
            has_judgements = bool(credit.silver) and trajectory.format_valid
            for index, turn in enumerate(sampled_turns(trajectory)):
                if turn.is_context:  # not trained here
                    continue
                is_answer.append(index == last)
                is_search.append(index != last and turn.is_action)
                is_judged.append(has_judgements)
                num_tokens.append(len(turn.token_ids))
                before.append(credit.before[position][index])
                after.append(credit.turns[position][index])
                correctness.append(credit.correctness[position][index])
    return _TurnColumns(
        is_answer=np.array(is_answer, bool),
        is_search=np.array(is_search, bool),
        is_judged=np.array(is_judged, bool),
        num_tokens=np.array(num_tokens, np.float64),
        before=np.array(before, np.float64),
        after=np.array(after, np.float64),
        correctness=np.array(correctness, np.float64),
    )


def _num_skipped(credits: Sequence[GroupCredit]) -> int:
    """Return the number of trajectories without a sampled token."""
    count = 0
    for credit in credits:
        for trajectory in credit.group.trajectories:
            if last_sampled_turn(trajectory) is None:
                count += 1
    return count


def _turn_metrics(credits: Sequence[GroupCredit]) -> dict[str, float]:
    turns = _turn_columns(credits)
    metrics = {"skipped_trajectories": float(_num_skipped(credits))}
    _add_token_counts(metrics, "search", turns, ~turns.is_answer)
    _add_token_counts(metrics, "answer", turns, turns.is_answer)
    if turns.num_tokens.any():
        sampled = turns.after[turns.num_tokens > 0].tolist()
        metrics["mean"] = float(np.average(turns.after, weights=turns.num_tokens))
        metrics["max"] = max(sampled)
        metrics["min"] = min(sampled)
    metrics["search/negative_before"] = _negative_search_sum(turns, turns.before)
    metrics["search/negative_after"] = _negative_search_sum(turns, turns.after)
    was_negative = turns.is_search & (turns.before < 0)
    _add_mean(metrics, "search/softened_share", (turns.after > turns.before)[was_negative])
    _add_correctness(metrics, turns.correctness[turns.is_search & turns.is_judged])
    return metrics


def _add_token_counts(
    metrics: dict[str, float], place: str, turns: _TurnColumns, is_counted: np.ndarray
) -> None:
    """Add the numbers of sampled tokens with a positive and with a negative advantage."""
    is_positive = is_counted & (turns.after > 0)
    is_negative = is_counted & (turns.after < 0)
    metrics[f"tokens/{place}_positive"] = float(turns.num_tokens[is_positive].sum())
    metrics[f"tokens/{place}_negative"] = float(turns.num_tokens[is_negative].sum())


def _negative_search_sum(turns: _TurnColumns, advantages: np.ndarray) -> float:
    """Return the magnitude of the negative advantages, summed over the tokens of the searches."""
    token_sums = advantages * turns.num_tokens  # float64 [N]
    _, negative = positive_negative_sums(token_sums[turns.is_search].tolist())
    return negative + 0.0  # turns -0 into 0


def _add_correctness(metrics: dict[str, float], values: np.ndarray) -> None:
    """Add the mean and the distribution of the correctness of the judged searches."""
    bins = {
        "zero": values == 0,
        "to_one_third": (values > 0) & (values <= 1 / 3),
        "to_two_thirds": (values > 1 / 3) & (values <= 2 / 3),
        "to_one": values > 2 / 3,
    }
    _add_mean(metrics, "correctness/mean", values)
    for name, members in bins.items():
        _add_mean(metrics, f"correctness/{name}_share", members)
