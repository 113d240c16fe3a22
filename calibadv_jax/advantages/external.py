"""Advantages by turn for other trainers: plain values in, NumPy arrays out, NumPy and RapidFuzz alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np

from calibadv_jax.advantages.estimators import ESTIMATORS, compute_advantages
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_READ_TEXTS = ("gigpo", "mt_grpo")  # estimators that compare observations or documents by their text


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

    score: float  # answer reward x format validity
    format_valid: bool
    turns: Sequence[TurnRecord]


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys and defaults of docs/configuration.md#advantage; UserError for an unknown choice."""

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
            value, choices = getattr(self, key), get_args(hint)
            if get_origin(hint) is Literal and value not in choices:
                raise UserError(f"{key} is {value!r}; use one of {', '.join(choices)}")
        if not self.target_ratio > 0:
            raise UserError(f"target_ratio is {self.target_ratio}; it must be positive")

    @property
    def is_calibrated(self) -> bool:
        return self.name == "calibadv"

    @property
    def estimator(self) -> str:
        return self.base if self.is_calibrated else self.name


def turn_advantages(
    group: Sequence[TrajectoryRecord], settings: AdvantageSettings = AdvantageSettings()
) -> list[np.ndarray]:
    """Return the advantage of each turn: float64 [turns] for each trajectory of one question in one step.

    UserError if the estimator is unknown or needs more than the records hold, or a score is not finite.
    """
    usable = [name for name, other in ESTIMATORS.items() if not other.needs and name not in _READ_TEXTS]
    if settings.estimator not in usable:
        fault = f"estimator {settings.estimator!r} cannot be computed from plain values"
        raise UserError(f"{fault}; use one of {', '.join(usable)}")
    question = Question("", "", ("",), "")
    trajectories = []
    for index, record in enumerate(group):
        if not np.isfinite(record.score):
            raise UserError(f"trajectory {index}: score is {record.score}; it must be finite")
        trajectory = Trajectory(question, np.zeros(0, np.int32), list(map(_turn, record.turns)), index)
        trajectory.format_valid, trajectory.answer_score = record.format_valid, float(record.score)
        trajectories.append(trajectory)
    config = cast("AdvantageConfig", settings)
    return compute_advantages([Group(question, trajectories)], config).credits[0].turns


def token_advantages(advantages: np.ndarray, num_tokens: Sequence[int], sampled: np.ndarray) -> np.ndarray:
    """Spread the advantages of a trajectory's turns over its response tokens.

    Returns float32 [T], 0 where `sampled` is false. UserError if the turns have another number of tokens.

    Args:
        advantages: [turns], of `turn_advantages`.
        num_tokens: sampled tokens of each turn.
        sampled: bool [T], true where the policy sampled the token; observations and padding are false.
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


def _turn(record: TurnRecord) -> Turn:
    documents = tuple(Document(name, "", "") for name in record.documents)
    tokens = np.zeros(record.num_tokens, np.int32)
    return Turn(record.kind, tokens, tokens.astype(np.float32), think=record.thought, documents=documents)
