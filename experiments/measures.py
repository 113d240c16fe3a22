"""What experiments/evidence.md defines: collapse, intervals over seeds, and which quantity warns first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.stats import binomtest, t

from calibadv_jax.contrib.report.runs import Run
from calibadv_jax.rollout_store.reader import read_columns

WINDOW = 10  # steps of the running means that define a collapse
LEAST_SHARE = 0.5  # of the earlier maximum of the reward, below which it has collapsed
LEAST_FORMAT = 0.5
REACH = 10  # steps before and after, whose values of other runs make the range
PATIENCE = 3  # steps in a row outside the range that make a warning, as guards.patience_steps
CONFIDENCE = 0.95

REWARD, FORMAT = "reward/mean", "reward/format_valid"
SEARCHES = "rollout/searches/mean"
SOFTENED = "advantage/search/softened_share"
WRONG_LENGTH, RIGHT_LENGTH = "length/wrong", "length/right"  # from the kept trajectories
QUANTITIES = {  # metric -> its name in the tables
    "actor/entropy": "entropy",
    "advantage/answer/ratio_before": "answer ratio",
    "rollout/sampled_perplexity": "perplexity",
    "rollout/think_repetition": "repetition",
    WRONG_LENGTH: "length wrong",
    RIGHT_LENGTH: "length right",
    "actor/grad_norm": "gradient norm",
    FORMAT: "format",
    SOFTENED: "softened share",
}

Values = dict[int, float]  # by step
Interval = tuple[float, float]


def running_mean(values: Values, width: int) -> Values:
    """Return the mean of the last `width` values at every step that has so many up to itself."""
    steps = sorted(values)
    return {
        steps[end - 1]: statistics.fmean(values[step] for step in steps[end - width : end])
        for end in range(width, len(steps) + 1)
    }


def collapse_step(reward: Values, format_valid: Values) -> int | None:
    """Return the first step at which the policy counts as collapsed, or None.

    The running mean over WINDOW steps of the training reward is below LEAST_SHARE of its own earlier maximum,
    or that of format validity is below LEAST_FORMAT.
    """
    means, formats = running_mean(reward, WINDOW), running_mean(format_valid, WINDOW)
    best = -math.inf
    for step in sorted(means.keys() | formats.keys()):
        value = means.get(step, math.inf)
        if value < LEAST_SHARE * best or formats.get(step, math.inf) < LEAST_FORMAT:
            return step
        if value < math.inf:
            best = max(best, value)
    return None


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's t interval of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    reach = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - reach, mean + reach


def share_interval(count: int, total: int) -> Interval:
    """Return the exact binomial (Clopper-Pearson) interval of a share of seeds."""
    interval = binomtest(count, total).proportion_ci(CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)


def quantities(run: Run) -> dict[str, Values]:
    """Return QUANTITIES by step; one that the run does not have is left out.

    The share of softened searches is 0 by definition where nothing is softened, and left out there.
    """
    series = {name: finite(run.values(name)) for name in QUANTITIES} | lengths(run)
    is_soft = run.setting("advantage.name") == "calibadv" and run.setting("advantage.soft_penalty")
    if not is_soft:
        series.pop(SOFTENED, None)
    return {name: values for name, values in series.items() if values}


def finite(values: Mapping[int, float | None]) -> Values:
    return {step: value for step, value in values.items() if value is not None}


def mean_at_the_end(values: Mapping[int, float | None], steps: int = 10) -> float | None:
    """Return the mean over the last steps that have a value; None where none has."""
    last = [value for _, value in sorted(finite(values).items())][-steps:]
    return statistics.fmean(last) if last else None


def lengths(run: Run) -> dict[str, Values]:
    """Return mean sampled tokens of the trajectories with reward 0 and with reward 1, by kept step."""
    lengths: dict[str, Values] = {WRONG_LENGTH: {}, RIGHT_LENGTH: {}}
    for step, path in run.rollouts.items():
        table = read_columns(path, ["error", "answer_score", "turns.list.element.token_ids"])
        table = table.filter(pc.is_null(table["error"]))
        scores = table["answer_score"].to_numpy()
        tokens = sampled_tokens(table["turns"].combine_chunks())
        for name, chosen in ((WRONG_LENGTH, scores == 0), (RIGHT_LENGTH, scores == 1)):
            if chosen.any():
                lengths[name][step] = float(tokens[chosen].mean())
    return lengths


def sampled_tokens(turns: pa.ListArray) -> np.ndarray:
    """Return int64 [N]: the sampled tokens of each trajectory, summed over its turns."""
    counts = pc.list_value_length(pc.struct_field(turns.flatten(), "token_ids")).to_numpy(
        zero_copy_only=False
    )
    total = np.concatenate([[0], np.cumsum(counts)])
    ends = np.cumsum(pc.list_value_length(turns).to_numpy(zero_copy_only=False))
    return total[ends] - total[np.concatenate([[0], ends[:-1]])]


@dataclass(frozen=True)
class Departure:
    """A quantity of a run has left the range of others."""

    step: int  # the last one of PATIENCE steps in a row
    side: str  # "above" or "below"


def first_departure(values: Values, others: Sequence[Values]) -> Departure | None:
    """Find the first time that a quantity is outside the range of other runs for PATIENCE steps in a row.

    Args:
        others: the same quantity of other runs; see `ranges`.
    """
    streak = {"below": 0, "above": 0}
    bounds = ranges(list(values), others)
    for step, value in sorted(values.items()):
        low, high = bounds.get(step, (-math.inf, math.inf))
        for side, is_outside in (("below", value < low), ("above", value > high)):
            streak[side] = streak[side] + 1 if is_outside else 0
            if streak[side] == PATIENCE:
                return Departure(step, side)
    return None


def ranges(steps: Sequence[int], others: Sequence[Values]) -> dict[int, Interval]:
    """Return the smallest and largest value of any run within REACH steps of each step that has some near.

    Not over all steps: entropy, say, falls in every training.
    """
    lows: Values = {}
    highs: Values = {}
    for reference in others:
        for step, value in reference.items():
            lows[step] = min(value, lows.get(step, value))
            highs[step] = max(value, highs.get(step, value))
    near = {step: [other for other in lows if abs(other - step) <= REACH] for step in steps}
    return {
        step: (min(lows[other] for other in steps_near), max(highs[other] for other in steps_near))
        for step, steps_near in near.items()
        if steps_near
    }
