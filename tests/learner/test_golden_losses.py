"""Losses against values and gradients of the published code, where they are present."""

from __future__ import annotations

import json

import numpy as np
import pytest
from loss_cases import packed, sample

from calibadv_jax.config import LossConfig

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_sum_norm",
    "mean over rows": "sequence_mean",
}
RENAMED = {  # other published losses have our names, but for hyphens
    "clip-higher": "vanilla",
    "dual-clip": "vanilla",
    "cispo_verl": "cispo",
    "geo-mean": "gmpo",
}
SAME = (
    "vanilla",
    "lld",
    "balance",
    "cispo",
    "clip-cov",
    "kl-cov",
    "gspo",
    "gpg",
    "sapo",
    "dppo-tv",
    "dppo-kl",
)
NAMES = {name: name.replace("-", "_") for name in (*SAME, "dro")} | RENAMED
SAME_FLAGS = ("vanilla", "clip-higher", "lld", "balance", "gspo")  # others count other tokens as clipped
SAME_KEYS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "drop_above",
    "lld_coef",
    "cov_share",
    "cov_low",
    "cov_high",
)
KEYS = {name: name for name in (*SAME_KEYS, "ratio_cap", "tau_positive", "tau_negative")} | {
    "gating": "lld_gating",
    "pg_loss_ratio": "balance_ratio",
    "kl_coef": "cov_kl_coef",
    "limit_low": "clip_low",
    "limit_high": "clip_high",
    "beta": "dro_beta",
}


CORRECTIONS = {  # those whose masked tokens leave the mean are scaled to ours, which stay in it
    0: {"importance_cap": 2.0},
    1: {"importance_cap": 2.0, "importance_level": "sequence"},
    4: {"importance_low": 0.5, "importance_high": 2.0},
    5: {"importance_cap": 2.0, "importance_low": 0.2, "importance_high": 2.0},
    7: {"importance_low": 0.5, "importance_high": 2.0, "importance_level": "sequence"},
    6: {  # the limits there are those of the weight's inverse
        "importance_low": 1 / 1.1,
        "importance_high": 1 / 0.9,
        "importance_level": "sequence_geometric",
    },
    8: {"importance_cap": 2.0, "reject_by": "k3", "reject_over": "sequence_max", "reject_above": 0.5},
    9: {"reject_by": "k3", "reject_above": 0.1},
    11: {"reject_by": "k2", "reject_over": "sequence_max", "reject_above": 0.4},
    12: {"importance_cap": 2.0, "importance_low": 0.5, "importance_high": 2.0},
    13: {
        "importance_cap": 3.0,
        "importance_low": 0.4,
        "importance_high": 3.0,
        "importance_level": "sequence",
    },
}


def config_of(case: dict) -> LossConfig:
    given = case["settings"]
    keys = {ours: given[key] for key, ours in KEYS.items() if key in given}
    if "clip_ratio" in given:
        keys |= {"clip_low": given["clip_ratio"], "clip_high": given["clip_ratio"]}
    aggregation = AGGREGATIONS[given["aggregation"]]
    norm = len(case["inputs"]["mask"][0]) if aggregation == "sequence_sum_norm" else 0
    return LossConfig(name=NAMES[case["loss"]], aggregation=aggregation, length_norm=norm, **keys)


def scale_of(case: dict) -> float:
    """What ours is multiplied with: they may count empty rows, and the Dr. GRPO sum is no mean over rows."""
    trained = sum(any(row) for row in case["inputs"]["mask"])
    aggregation, authors = case["settings"]["aggregation"], case["source"].startswith("CalibAdv")
    if authors and aggregation == "seq-mean-token-sum-norm":
        return trained
    if aggregation == "mean over rows" or (authors and aggregation == "seq-mean-token-sum"):
        return trained / len(case["inputs"]["mask"])
    return 1.0


class Chosen:
    """Draws the tokens that the published code drew."""

    def __init__(self, case: dict):
        rows = case["inputs"]["mask"]
        places = [[row, token] for row, mask in enumerate(rows) for token, on in enumerate(mask) if on]
        self.candidates = [places.index(place) for place in case["expected"]["candidates"]]
        self.chosen = [places.index(place) for place in case["expected"]["chosen"]]

    def choice(self, candidates, count, replace):
        assert list(candidates) == self.candidates and count == len(self.chosen) and not replace
        return np.array(self.chosen)


def assert_agrees(case: dict) -> None:
    inputs, expected = case["inputs"], case["expected"]
    columns = [inputs[name] for name in ("log_prob", "old_log_prob", "advantages", "mask")]
    rows = [sample(*row) for row in zip(*columns, strict=True)]
    rng = Chosen(case) if case["settings"].get("deterministic") is False else None
    loss, gradients, metrics = packed(rows, config_of(case), rng)
    scale = scale_of(case)
    np.testing.assert_allclose(scale * loss, expected["loss"], rtol=1e-4, atol=1e-5, err_msg=case["name"])
    for gradient, target in zip(gradients, expected["gradient"], strict=True):
        np.testing.assert_allclose(scale * gradient, target, rtol=1e-4, atol=1e-5, err_msg=case["name"])
    if case["loss"] in SAME_FLAGS:
        count = sum(map(sum, inputs["mask"]))
        assert metrics["actor/pg_clipfrac"] / count == pytest.approx(expected["clip_fraction"], abs=1e-6)


@pytest.fixture(scope="module")
def published(shared):
    return json.loads((shared / "golden" / "losses.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_published_values_and_gradients(published, name):
    cases = [case for case in published if case["loss"] == name]
    assert len(cases) == 6
    for case in cases:
        assert_agrees(case)


@pytest.mark.parametrize("number", CORRECTIONS)
def test_published_corrections_between_sampler_and_learner(published, number):
    (case,) = [case for case in published if case["name"] == f"rollout-correction_{number}"]
    inputs, expected = case["inputs"], case["expected"]
    names = ("log_prob", "old_log_prob", "advantages", "mask", "rollout_log_prob")
    rows = [sample(*row) for row in zip(*(inputs[name] for name in names), strict=True)]
    widths = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    loss, gradients, metrics = packed(rows, LossConfig(**widths, **CORRECTIONS[number]))
    count, kept = (sum(map(sum, mask)) for mask in (inputs["mask"], expected["kept_mask"]))
    scale = count / kept
    assert scale * loss == pytest.approx(expected["loss"], rel=1e-4, abs=1e-5)
    for gradient, target in zip(gradients, expected["gradient"], strict=True):
        np.testing.assert_allclose(scale * gradient, target, rtol=1e-4, atol=1e-5)
    if "reject" in case["settings"]:
        assert metrics["actor/sampler_masked"] == count - kept
