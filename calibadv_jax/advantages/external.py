"""Advantages by turn for other trainers: plain values in, NumPy arrays out.

This module and what it imports need NumPy and RapidFuzz alone.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import numpy as np

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS
from calibadv_jax.core.trajectory import NO_ACTIONS, Document, Group, Question, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

# Estimators that compare observations or documents by their text, which a `TurnRecord` lacks.
_NEED_TEXTS = ("gigpo", "mt_grpo")
# Estimators that compare the scores of all questions of a step.
_NEED_STEP = ("gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
# Kinds of turns that are no actions, in words.
_NO_ACTIONS = ", ".join(NO_ACTIONS[:-1]) + f" or {NO_ACTIONS[-1]}"


class _Bounds(NamedTuple):
    """The values that a number may have."""

    low: float
    high: float = math.inf
    includes_low: bool = True

    def hold(self, value: float) -> bool:
        """Return whether a value is finite and within the bounds."""
        is_above = value >= self.low if self.includes_low else value > self.low
        return math.isfinite(value) and is_above and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{self.low:g} or above" if self.includes_low else "positive"
        beginning = f"from {self.low:g} to" if self.includes_low else f"above {self.low:g}, up to"
        return f"{beginning} {self.high:g}"


# Bounds of the numbers in `AdvantageSettings`, as in the config's section.
_BOUNDS = {
    "score_threshold": _Bounds(0, 1),
    "turn_weight": _Bounds(0),
    "discount": _Bounds(0, 1, includes_low=False),
    "gae_lambda": _Bounds(0, 1),
    "silver_threshold": _Bounds(0, 1),
    "target_ratio": _Bounds(0, includes_low=False),
}


@dataclass(frozen=True)
class TurnRecord:
    """A turn as another trainer knows it.

    Raises:
        UserError: for a value of another type, a negative number of tokens, or a kind that hardly differs
            from "answer", "invalid" or "unfinished".
    """

    kind: str  # "search" (or another action), "answer", "invalid" or "unfinished"
    num_tokens: int  # sampled tokens, observations not counted
    documents: Sequence[str] = ()  # ids of the shown documents, in order
    thought: str = ""  # text between <think> and </think>

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not self.kind.strip():
            raise UserError(f"kind is {self.kind!r}; it is search (or another action) or {_NO_ACTIONS}")
        plain_kind = re.sub(r"[^a-z]", "", self.kind.lower())
        if plain_kind in NO_ACTIONS and self.kind != plain_kind:
            raise UserError(f"kind is {self.kind!r}, which would count as an action; write {plain_kind!r}")
        if not _is_integer(self.num_tokens) or self.num_tokens < 0:
            raise UserError(
                f"num_tokens is {self.num_tokens!r}; it is the number of sampled tokens, 0 or above"
            )
        if isinstance(self.documents, (str, bytes, Mapping, Set)) or not hasattr(self.documents, "__iter__"):
            raise UserError(f"documents is {self.documents!r}; it is a list of document ids, in order")
        for document in self.documents:
            if not isinstance(document, str):
                raise UserError(f"documents holds {document!r}; ids of documents are strings")
        if not isinstance(self.thought, str):
            raise UserError(f"thought is {self.thought!r}; it is a string, empty without a thought")


@dataclass(frozen=True)
class TrajectoryRecord:
    """A finished trajectory of a group.

    Raises:
        UserError: for a value of another type.
    """

    score: float  # answer reward × format validity
    format_valid: bool  # whether the trajectory keeps to the protocol
    turns: Sequence[TurnRecord]  # in order

    def __post_init__(self) -> None:
        if not _is_number(self.score):
            raise UserError(f"score is {self.score!r}; it is a number")
        if not _is_truth(self.format_valid):
            raise UserError(f"format_valid is {self.format_valid!r}; it is True or False")
        if isinstance(self.turns, (str, bytes)) or not isinstance(self.turns, Sequence):
            raise UserError(f"turns is {self.turns!r}; it is a list of TurnRecord")
        for index, turn in enumerate(self.turns):
            if not isinstance(turn, TurnRecord):
                raise UserError(f"turn {index} is {turn!r}; make a TurnRecord of it")


def _is_integer(value: Any) -> bool:
    """Return whether a value is a whole number of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Return whether a value is one real number, also of NumPy, PyTorch or JAX."""
    if isinstance(value, numbers.Real):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "__float__")


def _is_truth(value: Any) -> bool:
    """Return whether a value is true or false, also as 0 or 1 or a value of NumPy, PyTorch or JAX."""
    return _is_number(value) and float(value) in (0.0, 1.0)


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys and defaults of the section `advantage` (docs/configuration.md#advantage).

    Raises:
        UserError: for a value that the section refuses too.
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
            is_choice = isinstance(value, str) and value in choices
            if get_origin(hint) is Literal and not is_choice:
                raise UserError(f"{key} is {value!r}; use one of {', '.join(choices)}")
            if hint is bool and not isinstance(value, bool | np.bool_):
                raise UserError(f"{key} is {value!r}; it is True or False")
            if hint is str and not isinstance(value, str):
                raise UserError(f"{key} is {value!r}; it is the name of an estimator")
            if key in _BOUNDS and not (_is_number(value) and _BOUNDS[key].hold(float(value))):
                raise UserError(f"{key} is {value!r}; it must be {_BOUNDS[key]}")
        is_list = isinstance(self.probes, list | tuple)
        if not is_list or any(probe not in ("current", "initial") for probe in self.probes):
            raise UserError(f"probes is {self.probes!r}; it is a tuple of current, initial, or both")

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
        UserError: if the estimator is unknown or needs more than the records hold, the settings need all
            questions of the step, or a score is not finite.
    """
    needs_step = []
    for key in ("std_over", "rebalance_within"):
        if getattr(settings, key) == "step":
            needs_step.append(f"{key} is 'step'")
    if settings.estimator in _NEED_STEP:
        needs_step.append(f"{settings.estimator} compares all scores of the step")
    if needs_step:
        raise UserError(
            f"{needs_step[0]}, but turn_advantages gets one question; call step_advantages with the groups of"
            " all questions of the step"
        )
    (advantages,) = step_advantages([group], settings)
    return advantages


def step_advantages(
    groups: Sequence[Sequence[TrajectoryRecord]], settings: AdvantageSettings = AdvantageSettings()
) -> list[list[np.ndarray]]:
    """Return the advantage of each turn of all trajectories of one step.

    Args:
        groups: for each question of the step its finished trajectories.
        settings: the estimator and its calibration; by default CalibAdv as in the paper.

    Returns:
        For each group a list, which has for each trajectory of K turns float64 [K].

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
    scored_groups = []
    for number, group in enumerate(groups):
        question = Question(str(number), "", ("",), "")
        place = f"group {number}, " if len(groups) > 1 else ""
        trajectories = []
        for index, record in enumerate(group):
            trajectories.append(_trajectory(question, record, index, place))
        scored_groups.append(Group(question, trajectories))
    config = cast("AdvantageConfig", settings)
    result = compute_advantages(scored_groups, config)
    return [credit.turns for credit in result.credits]


def _trajectory(question: Question, record: TrajectoryRecord, index: int, place: str) -> Trajectory:
    """Return the trajectory of a record; `place` names its group in messages."""
    if not isinstance(record, TrajectoryRecord):
        raise UserError(f"{place}trajectory {index} is {record!r}; make a TrajectoryRecord of it")
    if not math.isfinite(record.score):
        raise UserError(f"{place}trajectory {index}: score is {record.score}; it must be finite")
    return Trajectory(
        question,
        prompt_ids=np.zeros(0, np.int32),
        turns=[_turn(turn) for turn in record.turns],
        index=index,
        format_valid=bool(record.format_valid),
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
        UserError: if `advantages` and `num_tokens` have different numbers of turns, or `sampled` and
            `num_tokens` different numbers of sampled tokens.
    """
    if len(advantages) != len(num_tokens):
        raise UserError(
            f"there are advantages of {len(advantages)} turns, but numbers of tokens of {len(num_tokens)}"
        )
    for count in num_tokens:
        if not _is_integer(count) or count < 0:
            raise UserError(f"num_tokens holds {count!r}; it is a number of tokens for each turn, 0 or above")
    sampled = np.asarray(sampled, bool)
    if sampled.ndim != 1:
        raise UserError(f"the mask has the shape {sampled.shape}; give one trajectory's, of the shape [T]")
    if sampled.sum() != sum(num_tokens):
        raise UserError(
            f"the mask has {sampled.sum()} sampled tokens, but the turns have {sum(num_tokens)}; count the"
            " same tokens in both"
        )
    values = np.zeros(len(sampled), np.float32)
    values[sampled] = np.repeat(np.asarray(advantages, np.float32), num_tokens)
    return values
