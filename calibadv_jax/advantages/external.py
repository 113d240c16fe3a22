"""Advantages by turn for other trainers: plain values in, NumPy arrays out.

This module and what it imports need NumPy and RapidFuzz alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

# Estimators that compare observations or documents by their text, which a `TurnRecord` lacks.
_NEED_TEXTS = ("gigpo", "mt_grpo")


@dataclass(frozen=True)
class TurnRecord:
    """A turn as another trainer knows it."""

    kind: str  # "search" (or another action), "answer", "invalid" or "unfinished"
    num_tokens: int  # sampled tokens, observations not counted
    documents: Sequence[str] = ()  # ids of the shown documents, in order
    thought: str = ""  # text between <think> and </think>


@dataclass(frozen=True)
class TrajectoryRecord:
    """A finished trajectory of a group."""

    score: float  # answer reward × format validity
    format_valid: bool  # whether the trajectory keeps to the protocol
    turns: Sequence[TurnRecord]  # in order


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys and defaults of the section `advantage` (docs/configuration.md#advantage).

    Raises:
        UserError: for an unknown choice, or a `target_ratio` that is not positive.
    """

    name: str = "calibadv"
    base: str = "grpo"
    normalize_std: bool = True
    std_over: Literal["group", "step"] = "group"
    score_threshold: float = 0.7
    turn_weight: float = 1.0
    discount: float = 1.0
    gae_lambda: float = 1.0
    probes: tuple[str, ...] = ()
    soft_penalty: bool = True
    softening: Literal["plain", "aggressive", "upper_limit", "reset"] = "plain"
    silver_threshold: float = 0.7
    correctness: Literal["fraction", "max", "mean"] = "fraction"
    rebalance: bool = True
    rebalance_over: Literal["answer", "turn", "all"] = "answer"
    rebalance_within: Literal["group", "step"] = "group"
    rebalance_by: Literal["advantage", "tokens"] = "advantage"
    rebalance_excess: bool = False
    target_ratio: float = 1.0
    adjust: Literal["positive", "negative", "clip"] = "positive"

    def __post_init__(self) -> None:
        for key, hint in get_type_hints(AdvantageSettings).items():
            value = getattr(self, key)
            choices = get_args(hint)
            if get_origin(hint) is Literal and value not in choices:
                raise UserError(f"{key} is {value!r}; use one of {', '.join(choices)}")
        if not self.target_ratio > 0:
            raise UserError(f"target_ratio is {self.target_ratio}; it must be positive")

    @property
    def is_calibrated(self) -> bool:
        """Whether CalibAdv calibrates the advantages of `base`."""
        return self.name == "calibadv"

    @property
    def estimator(self) -> str:
        """Name of the estimator before any calibration."""
        return self.base if self.is_calibrated else self.name


def turn_advantages(
    group: Sequence[TrajectoryRecord], settings: AdvantageSettings = AdvantageSettings()
) -> list[np.ndarray]:
    """Return the advantage of each turn of the trajectories of one question in one step.

    Args:
        group: the finished trajectories of the question, G of them.
        settings: the estimator and its calibration; by default CalibAdv as in the paper.

    Returns:
        G arrays: for a trajectory of K turns float64 [K].

    Raises:
        UserError: if the estimator is unknown or needs more than the records hold, or a score is not finite.
    """
    usable = []
    for name, estimator in ESTIMATORS.items():
        if not estimator.needs and name not in _NEED_TEXTS:
            usable.append(name)
    if settings.estimator not in usable:
        raise UserError(
            f"estimator {settings.estimator!r} cannot be computed from plain values;"
            f" use one of {', '.join(usable)}"
        )
    question = Question("", "", ("",), "")
    trajectories = [_trajectory(question, record, index) for index, record in enumerate(group)]
    config = cast("AdvantageConfig", settings)
    result = compute_advantages([Group(question, trajectories)], config)
    return result.credits[0].turns


def _trajectory(question: Question, record: TrajectoryRecord, index: int) -> Trajectory:
    if not np.isfinite(record.score):
        raise UserError(f"trajectory {index}: score is {record.score}; it must be finite")
    return Trajectory(
        question,
        prompt_ids=np.zeros(0, np.int32),
        turns=[_turn(turn) for turn in record.turns],
        index=index,
        format_valid=record.format_valid,
        answer_score=float(record.score),
    )


def _turn(record: TurnRecord) -> Turn:
    return Turn(
        record.kind,
        token_ids=np.zeros(record.num_tokens, np.int32),
        logprobs=np.zeros(record.num_tokens, np.float32),
        think=record.thought,
        documents=tuple(Document(name, "", "") for name in record.documents),
    )


def token_advantages(advantages: np.ndarray, num_tokens: Sequence[int], sampled: np.ndarray) -> np.ndarray:
    """Expand the advantages of a trajectory's turns to its response tokens.

    Args:
        advantages: float64 [K], one for each turn, from `turn_advantages`.
        num_tokens: K numbers, the sampled tokens of each turn.
        sampled: bool [T], true where the policy sampled the token; false for observations and padding.

    Returns:
        float32 [T]; 0 where `sampled` is false.

    Raises:
        UserError: if `sampled` and `num_tokens` have different numbers of sampled tokens.
    """
    sampled = np.asarray(sampled, bool)
    if sampled.sum() != sum(num_tokens):
        raise UserError(
            f"the mask has {sampled.sum()} sampled tokens, but the turns have {sum(num_tokens)}; count the"
            " same tokens in both"
        )
    values = np.zeros(len(sampled), np.float32)
    values[sampled] = np.repeat(np.asarray(advantages, np.float32), num_tokens)
    return values
