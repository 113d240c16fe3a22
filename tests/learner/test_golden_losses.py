"""Losses against values and gradients of the published code, where they are present."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from loss_cases import packed, sample

from calibadv_jax.config import LossConfig
from calibadv_jax.learner.losses import LOSSES

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_sum_norm",
    "mean over rows": "sequence_mean",
}
NAMES = {  # of the published losses; others are ours, but for hyphens
    "clip-higher": "vanilla",
    "dual-clip": "vanilla",
    "cispo_verl": "cispo",
    "geo-mean": "gmpo",
} | {name.replace("_", "-"): name for name in LOSSES if name not in ("gmpo", "balance_detached")}
SAME_FLAGS = ("vanilla", "clip-higher", "lld", "balance", "gspo")  # others count other tokens as clipped
KEYS = {
    "gating": "lld_gating",
    "pg_loss_ratio": "balance_ratio",
    "kl_coef": "cov_kl_coef",
    "limit_low": "clip_low",
    "limit_high": "clip_high",
    "beta": "dro_beta",
} | {field.name: field.name for field in fields(LossConfig) if field.name not in ("kl_coef", "aggregation")}
CORRECTIONS = {  # those whose masked tokens leave the mean are scaled to ours, which stay in it
    0: {"importance_cap": 2.0},
    1: {"importance_cap": 2.0, "importance_level": "sequence"},
    4: {"importance_low": 0.5, "importance_high": 2.0},
    5: {"importance_cap": 2.0, "importance_low": 0.2, "importance_high": 2.0},
    7: {"importance_low": 0.5, "importance_high": 2.0, "importance_level": "sequence"},
    # The limits there are those of the weight's inverse.
    6: {"importance_low": 1 / 1.1, "importance_high": 1 / 0.9, "importance_level": "sequence_geometric"},
    8: {"importance_cap": 2.0, "reject_by": "k3", "reject_over": "sequence_max", "reject_above": 0.5},
    9: {"reject_by": "k3", "reject_above": 0.1},
    11: {"reject_by": "k2", "reject_over": "sequence_max", "reject_above": 0.4},
    12: {"importance_cap": 2.0, "importance_low": 0.5, "importance_high": 2.0},
    13: {"importance_cap": 3.0, "importance_low": 0.4, "importance_high": 3.0}
    | {"importance_level": "sequence"},
}


def config_of(case: dict) -> LossConfig:
    settings = case["settings"]
    keys = {ours: settings[key] for key, ours in KEYS.items() if key in settings}
    if "clip_ratio" in settings:
        keys |= {"clip_low": settings["clip_ratio"], "clip_high": settings["clip_ratio"]}
    aggregation = AGGREGATIONS[settings["aggregation"]]
    norm = len(case["inputs"]["mask"][0]) if aggregation == "sequence_sum_norm" else 0
    return LossConfig(name=NAMES[case["loss"]], aggregation=aggregation, length_norm=norm, **keys)


def scale_of(case: dict) -> float:
    """The factor of our loss: theirs may count empty rows, and the Dr. GRPO sum is no mean over rows."""
    trained = sum(any(row) for row in case["inputs"]["mask"])
    aggregation, authors = case["settings"]["aggregation"], case["source"].startswith("CalibAdv")
    if authors and aggregation == "seq-mean-token-sum-norm":
        return trained
    if aggregation == "mean over rows" or (authors and aggregation == "seq-mean-token-sum"):
        return trained / len(case["inputs"]["mask"])
    return 1.0


class Draw:
    """Draws the tokens that the published code drew."""

    def __init__(self, case: dict):
        places = np.argwhere(case["inputs"]["mask"]).tolist()
        self.candidates, self.chosen = (
            [places.index(place) for place in case["expected"][name]] for name in ("candidates", "chosen")
        )

    def choice(self, candidates, count, replace):
        assert list(candidates) == self.candidates and count == len(self.chosen) and not replace
        return np.array(self.chosen)


def compared(case: dict, config: LossConfig, scale: float, *more: str, rng=None) -> dict[str, float]:
    """Compare loss and gradients; return our metrics."""
    names = ("log_prob", "old_log_prob", "advantages", "mask", *more)
    rows = [sample(*row) for row in zip(*(case["inputs"][name] for name in names), strict=True)]
    loss, gradients, metrics = packed(rows, config, rng)
    tolerances = {"rtol": 1e-4, "atol": 1e-5, "err_msg": case["name"]}
    np.testing.assert_allclose(scale * loss, case["expected"]["loss"], **tolerances)
    for gradient, target in zip(gradients, case["expected"]["gradient"], strict=True):
        np.testing.assert_allclose(scale * gradient, target, **tolerances)
    return metrics


@pytest.fixture(scope="module")
def published(shared):
    return json.loads((shared / "golden" / "losses.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_published_values_and_gradients(published, name):
    cases = [case for case in published if case["loss"] == name]
    assert len(cases) == 6
    for case in cases:
        rng = Draw(case) if case["settings"].get("deterministic") is False else None
        metrics = compared(case, config_of(case), scale_of(case), rng=rng)
        if name in SAME_FLAGS:
            fraction = metrics["actor/pg_clipfrac"] / np.sum(case["inputs"]["mask"])
            assert fraction == pytest.approx(case["expected"]["clip_fraction"], abs=1e-6)


@pytest.mark.parametrize("number", CORRECTIONS)
def test_published_corrections_between_sampler_and_learner(published, number):
    (case,) = [case for case in published if case["name"] == f"rollout-correction_{number}"]
    config = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, **CORRECTIONS[number])
    count, accepted = np.sum(case["inputs"]["mask"]), np.sum(case["expected"]["kept_mask"])
    metrics = compared(case, config, count / accepted, "rollout_log_prob")
    if "reject" in case["settings"]:
        assert metrics["actor/sampler_masked"] == count - accepted
