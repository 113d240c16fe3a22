"""Evaluation, during training and alone."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.section import SECTION


@dataclass(frozen=True, config=SECTION)
class EvaluateConfig:
    policy: str = ""
    """HuggingFace folder to evaluate, or OWNER/NAME[@REVISION] of the hub; empty: policy.path."""
    every: NonNegativeInt = 0
    """Training steps between evaluations; 0: none during training."""
    temperatures: list[NonNegativeFloat] = Field(default_factory=lambda: [0.0])
    """One pass over the evaluation questions for each."""
    samples: PositiveInt = 1
    """Trajectories per question at temperatures above 0."""
    output: str = "${run.dir}/evaluation.json"
    """JSON file of the scores."""
