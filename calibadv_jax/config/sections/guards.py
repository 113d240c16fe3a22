"""Watchdogs against a collapse of the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION


@dataclass(frozen=True, config=SECTION)
class GuardsConfig:
    action: Literal["log", "stop", "rollback"] = "log"
    """What happens when a guard trips. log: the console says so; stop: the run ends with its state saved;
    rollback: the run goes back to the last good checkpoint and on from there with other random draws. The
    thresholds are rules of thumb, so log is the default."""
    patience: PositiveInt = 3
    """Number of steps in a row beyond a threshold before its guard trips; one bad batch is no collapse."""
    max_rollbacks: NonNegativeInt = 3
    """rollback: number of rollbacks after which the run stops; a collapse that comes back needs other
    settings."""
    min_entropy: PositiveFloat | None = 0.01
    """Smallest actor/entropy allowed (nats a token). At 0.01 a policy is nearly deterministic: the
    trajectories of a group are the same, tie, and teach nothing. Healthy quickstarts end at 0.02 to 0.07.
    null: off."""
    min_format_valid: float | None = Field(default=0.1, gt=0, le=1)
    """Smallest reward/format_valid allowed. The reward is multiplied by format validity: with fewer than one
    valid trajectory in ten, groups hold next to no reward to compare. null: off."""
    max_think_repetition: float | None = Field(default=0.3, gt=0, le=1)
    """Largest rollout/think_repetition allowed, the share of 4-grams of a turn that are repeated in it.
    Technical prose has about 0.06, a loop close to 1; thinks degenerate before the reward falls. null:
    off."""
    max_sampled_perplexity: float | None = Field(default=10.0, gt=1)
    """Largest rollout/sampled_perplexity allowed. A trained policy is near 1 to 3; at 10 it samples noise, as
    after too large an update. null: off."""
    max_answer_ratio: PositiveFloat | None = 5.0
    """Largest advantage/answer/ratio_before allowed: blame / praise of the answer turns. It is about 1 if
    right and wrong answers are equally long; at 5 nearly all that is learned is what not to say, because
    wrong answers have become far longer than right answers. null: off."""
