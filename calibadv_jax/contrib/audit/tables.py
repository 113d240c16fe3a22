"""What an audit prints and writes: tables of measures, the verdict in words, and everything as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from calibadv_jax.contrib.audit.evidence import BLAME, Evidence, Variant, join_pairs, pool
from calibadv_jax.contrib.audit.measures import MEASURES, OVER_TRAINING, VERDICTS, measure, verdicts
from calibadv_jax.evaluation.score_tables import MIN_QUESTIONS_FOR_INTERVAL, bootstrap_intervals_of_sums
from calibadv_jax.metrics.console import table

CONFIDENCE = 0.95  # coverage of the verdict's intervals
RESAMPLES = 2000  # bootstrap resamples of the verdict's intervals
WINDOW = 10  # steps in a row of the table over training
MAX_EXPLAINED_COLUMNS = 2  # with more columns a table has no room for the meaning of its measures


def totals_table(runs: Sequence[Sequence[Variant]]) -> str:
    """Return a table with a row for each measure and a column for each variant of the settings.

    Args:
        runs: the variants of each run, the same ones in the same order.

    Returns:
        The table; `cells` describes what a cell shows.
    """
    columns = []
    for variants in zip(*runs, strict=True):  # the same variant of every run
        true = []
        control = []
        for variant in variants:
            evidence = pool(variant)
            true.append(measure(evidence.true))
            control.append(measure(evidence.control))
        columns.append(cells(MEASURES, true, control))
    headers = ["measure", *(variant.name for variant in runs[0])]
    if len(columns) <= MAX_EXPLAINED_COLUMNS:
        headers.append("what")
        columns.append(list(MEASURES.values()))
    return table(list(zip(MEASURES, *columns, strict=True)), headers)


def windows_table(variant: Variant) -> str:
    """Return a table with a row for each window of steps: 1 … WINDOW, WINDOW + 1 … 2 WINDOW, and so on."""
    rows = []
    for _, window in groupby(variant.steps, lambda step: (step - 1) // WINDOW):
        steps = list(window)
        evidence = join_pairs(variant.steps[step] for step in steps)
        true = measure(evidence.true)
        control = measure(evidence.control)
        rows.append([f"{min(steps)}-{max(steps)}", *cells(OVER_TRAINING, [true], [control])])
    headers = [name.removeprefix("blame/") for name in OVER_TRAINING]
    return table(rows, ["steps", *headers])


def verdicts_table(estimators: Sequence[Variant]) -> str:
    """Return a table with a row for each estimator, CalibAdv first, and a column for each verdict."""
    calibadv = pool(estimators[0])
    rows = []
    for estimator in estimators:
        evidence = pool(estimator)
        true = verdicts(evidence.true, calibadv.true)
        control = verdicts(evidence.control, calibadv.control)
        rows.append([estimator.name, *cells(VERDICTS, [true], [control])])
    return table(rows, ["estimator", *VERDICTS])


def cells(
    names: Iterable[str], true: Sequence[Mapping[str, float]], control: Sequence[Mapping[str, float]]
) -> list[str]:
    """Return ``mean [lowest, highest] (mean of the controls)`` of each measure.

    The range is omitted for a single run. "-" stands where no run has the measure.
    """
    texts = []
    for name in names:
        values = [measures[name] for measures in true if name in measures]
        control_values = [measures[name] for measures in control if name in measures]
        text = f"{np.mean(values):.3f}" if values else "-"
        if values and len(true) > 1:
            text += f" [{min(values):.3f}, {max(values):.3f}]"
        text += f" ({np.mean(control_values):.3f})" if control_values else " (-)"
        texts.append(text)
    return texts


def verdict(runs: Sequence[Variant]) -> str:
    """Say whether the lead is larger than the control's, with intervals over the groups of all runs.

    The lead is the share of their blame that the calibration takes from truly good searches, less the share
    that it takes from useless ones.
    """
    true, control = pool(*runs)
    num_good = int((true.groups["good_blame"] > 0).sum())
    num_useless = int((true.groups["useless_blame"] > 0).sum())
    if min(num_good, num_useless) < MIN_QUESTIONS_FOR_INTERVAL:
        return (
            f"cannot say: truly good searches are blamed in {num_good} groups and useless ones in"
            f" {num_useless}; at least {MIN_QUESTIONS_FOR_INTERVAL} of each are needed"
        )
    blame = np.column_stack([_blame_columns(true), _blame_columns(control)])  # float64 [N, 8]
    lead, control_lead = _leads(blame.sum(axis=0, keepdims=True))[0]
    interval, control_interval = bootstrap_intervals_of_sums(blame, _leads, CONFIDENCE, RESAMPLES)
    low, high = interval
    control_low, control_high = control_interval
    if low > control_high:
        conclusion = "better than chance"
    elif high < control_low:
        conclusion = "worse than chance"
    else:
        conclusion = "cannot say whether it is better than chance"
    return (
        f"{conclusion}: the lead is {lead:.3f} [{low:.3f}, {high:.3f}], with shuffled rewards (control)"
        f" {control_lead:.3f} [{control_low:.3f}, {control_high:.3f}]"
    )


def _blame_columns(evidence: Evidence) -> np.ndarray:
    """Return the fields of BLAME as columns, float64 [N, 4], a row for each group."""
    return np.column_stack([evidence.groups[name] for name in BLAME])


def _leads(sums: np.ndarray) -> np.ndarray:
    """Return the true lead and the control's, float64 [R, 2].

    Args:
        sums: sums over groups, float64 [R, 8]: the fields of BLAME, true and then of the control.
    """
    width = len(BLAME)
    return np.column_stack([_lead(sums[:, :width]), _lead(sums[:, width:])])


def _lead(sums: np.ndarray) -> np.ndarray:
    """Return the lead of each row, float64 [R], NaN or infinite where nothing is blamed.

    Args:
        sums: the fields of BLAME, float64 [R, 4].
    """
    good_blame, good_spared, useless_blame, useless_spared = sums.T
    with np.errstate(invalid="ignore", divide="ignore"):
        good_share = good_spared / good_blame
        useless_share = useless_spared / useless_blame
    return good_share - useless_share


def as_json(variant: Variant) -> dict[str, Any]:
    """Return what was measured under one variant: true and control, in total and by step."""
    pooled = pool(variant)
    true_steps = [{"step": step} | measure(pair.true) for step, pair in variant.steps.items()]
    control_steps = [{"step": step} | measure(pair.control) for step, pair in variant.steps.items()]
    return {
        "name": variant.name,
        "overrides": list(variant.overrides),
        "verdict": verdict([variant]),
        "true": {"total": measure(pooled.true), "steps": true_steps},
        "control": {"total": measure(pooled.control), "steps": control_steps},
    }
