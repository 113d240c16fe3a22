"""From answers to advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION


@dataclass(frozen=True, config=SECTION)
class RewardConfig:
    answer: Literal["f1", "em", "cover_em"] = "f1"
    """How the answer is compared with the golden answers; the best match counts."""
    format: bool = True
    """Multiply the answer reward by format validity (0 or 1)."""
    shuffle: bool = False
    """Control experiment: permute the rewards of the step's trajectories, so that they carry no signal."""


@dataclass(frozen=True, config=SECTION)
class AdvantageConfig:
    name: Literal["grpo", "calibadv"] = "calibadv"
    """Algorithm. grpo: one advantage for each trajectory; calibadv: one for each turn (docs/calibadv.md)."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); false: only subtract the mean (Dr.
    GRPO)."""
    soft_penalty: bool = True
    """calibadv: scale a negative advantage of a search turn by 1 - correctness."""
    silver_threshold: float = Field(default=0.7, ge=0, le=1)
    """calibadv: lowest answer score of a trajectory whose documents are silver."""
    correctness: Literal["fraction", "max", "mean"] = "fraction"
    """calibadv: how the correctness of a search turn follows from the silver documents that it found."""
    rebalance: bool = True
    """calibadv: balance positive and negative advantage of the answer turns within each group."""
    target_ratio: PositiveFloat = 1.0
    """calibadv: the paper's lambda: |negative sum| / positive sum over answer-turn tokens after the
    rebalance."""
    adjust: Literal["positive", "negative"] = "positive"
    """calibadv: the side that the rebalance multiplies by a factor."""
