"""CalibAdv (arXiv 2604.18235): advantages of an estimator, by default GRPO, calibrated turn by turn.

1. Silver documents (`silver_documents`): the documents that a group's best trajectories saw.
2. Correctness of a search (`judge_turns`): the share of its documents that are silver and that the trajectory
   had not seen before.
3. Soft penalty: a negative advantage A of a search turn becomes A (1 - correctness).
4. Rebalance: the advantages of a group's answer turns on one side of 0 are scaled, by default the positive
   ones, until |sum of negative| / (sum of positive) over their tokens is λ. A trajectory's answer turn is its
   last sampled turn, whatever its kind.

The variants of the authors' code (github.com/wujwyi/CalibAdv, `less_negative`) follow the paper's rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from rapidfuzz.distance import Levenshtein

from calibadv_jax.advantages.credit import (
    GroupCredit,
    answer_turn_sums,
    last_sampled_turn,
    positive_negative_sums,
    rebalance_factors,
    search_turns,
)
from calibadv_jax.core.trajectory import Group, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

_MAX_SHARED_DOCUMENTS = 1  # Two turns that share more distinct documents than this repeat each other.
_AGGRESSIVE_CORRECTNESS = 1 / 3  # Correctness from which `aggressive` removes the whole penalty.
# The values of the paper's rule. Another value of one of these keys selects a variant of the authors' code.
_PAPER_SETTINGS = {
    "softening": "plain",
    "rebalance_over": "answer",
    "rebalance_within": "group",
    "rebalance_by": "advantage",
    "rebalance_excess": False,
}


# --- The paper's rule ---


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Apply the soft penalty and the rebalance, as far as each is switched on.

    Args:
        credits: the credit of each group of the step, with correctness as `judge` returns it.
        config: the section `advantage`.

    Returns:
        Credit with new `turns` and, after the soft penalty, `softened`.
    """
    calibrated = list(credits)
    if config.soft_penalty:
        calibrated = [_soften(credit) for credit in calibrated]
        if config.softening != "plain":
            calibrated = [_soften_variant(credit, config.softening) for credit in calibrated]
    if not config.rebalance:
        return calibrated
    if any(key != "softening" for key in variant_keys(vars(config))):
        return _rebalance_variant(calibrated, config)
    return [_rebalance(credit, config) for credit in calibrated]


def _soften(credit: GroupCredit) -> GroupCredit:
    """Scale the negative advantages of search turns by 1 - correctness.

    Turns that are no search have correctness 0 and so keep their advantage, and so does the answer turn.
    """
    turns = []
    softened = []
    columns = zip(credit.group.trajectories, credit.turns, credit.correctness, strict=True)
    for trajectory, advantages, correctness in columns:  # both float64 [K]
        answer = last_sampled_turn(trajectory) or 0
        is_before_answer = np.arange(len(advantages)) < answer
        is_softened = is_before_answer & (advantages < 0) & (correctness > 0)
        scaled = advantages * (1 - correctness)
        turns.append(np.where(is_softened, scaled, advantages))
        softened.append(is_softened)
    return replace(credit, turns=turns, softened=softened)


def _rebalance(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Scale the answer turns on one side of 0 until their |negative| / positive sum over tokens is λ."""
    positive, negative = answer_turn_sums(credit.group, credit.answer_advantages())
    positive_factor, negative_factor = rebalance_factors(positive, negative, config)
    turns = [advantages.copy() for advantages in credit.turns]
    for trajectory, advantages in zip(credit.group.trajectories, turns, strict=True):
        answer = last_sampled_turn(trajectory)
        if answer is not None:
            advantages[answer] *= positive_factor if advantages[answer] > 0 else negative_factor
    return replace(credit, turns=turns)


# --- Silver documents and correctness ---


@dataclass(frozen=True)
class Judgement:
    """The correctness of a turn by its group's silver documents, and the reason for it."""

    correctness: float = 0.0  # in [0, 1]
    # What the turn repeats: "think of turn 1" or "documents of turn 2", counted from 1. None: nothing.
    repeated: str | None = None
    # Ids of its silver documents that no earlier turn of the trajectory showed, in the order shown.
    found_silver: tuple[str, ...] = ()


def judge(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Add the group's silver documents, and the correctness of each search by them.

    Args:
        credit: the uncalibrated credit of a group.
        config: the section `advantage`; `silver_threshold` and `correctness` are read.

    Returns:
        Credit with `silver`, `correctness`, `repeated` and `found_silver`.

    Raises:
        ValueError: if `config.correctness` is unknown.
    """
    silver = silver_documents(credit.group, config.silver_threshold)
    correctness = []
    repeated = []
    found_silver = []
    for trajectory in credit.group.trajectories:
        judgements = judge_turns(trajectory, silver, config.correctness)
        values = [judgement.correctness for judgement in judgements]
        correctness.append(np.array(values, np.float64))
        repeated.append([judgement.repeated for judgement in judgements])
        found_silver.append([judgement.found_silver for judgement in judgements])
    return replace(
        credit, silver=silver, correctness=correctness, repeated=repeated, found_silver=found_silver
    )


def silver_documents(group: Group, threshold: float) -> dict[str, float]:
    """Return the documents that the group's best trajectories saw, with their weights.

    A trajectory is among the best if its format is valid, its relative score is at least `threshold` and its
    score is the largest of the group. A document's weight is the number of best trajectories that saw it,
    divided by the largest such number.

    Args:
        group: a scored group.
        threshold: in [0, 1], see `AdvantageConfig.silver_threshold`.

    Returns:
        Document id -> weight in (0, 1]; empty if there is no best trajectory.
    """
    best = max(group.trajectories, key=lambda trajectory: trajectory.answer_score, default=None)
    if best is None or best.relative_score < threshold:
        return {}
    counts: Counter[str] = Counter()  # number of best trajectories that saw each document
    for trajectory in group.trajectories:
        if trajectory.format_valid and trajectory.answer_score == best.answer_score:
            counts.update(_distinct_documents(trajectory.turns))
    largest = max(counts.values(), default=1)
    return {document: count / largest for document, count in counts.items()}


def judge_turns(trajectory: Trajectory, silver: Mapping[str, float], how: str) -> list[Judgement]:
    """Judge each search of a trajectory by the silver documents that it newly shows.

    A search has correctness 0 if it shows no silver document that is new to the trajectory, or if it repeats
    an earlier turn: more than half of its thought is the same in words, by edit distance, or it shares two or
    more distinct documents with that turn. Otherwise its correctness follows from its new silver documents:

    - "fraction": their number, divided by the number of all documents shown;
    - "max": the largest of their weights;
    - "mean": the sum of their weights, divided by the number of all documents shown.

    Nothing is judged in a trajectory of invalid format, nor without silver documents.

    Args:
        trajectory: a scored trajectory of K turns.
        silver: document id -> weight in (0, 1], from `silver_documents`.
        how: "fraction", "max" or "mean", see `AdvantageConfig.correctness`.

    Returns:
        K judgements; that of a turn without an action is empty.

    Raises:
        ValueError: if `how` is another word.
    """
    judgements = [Judgement() for _ in trajectory.turns]
    if not silver or not trajectory.format_valid:
        return judgements
    for index, turn in enumerate(trajectory.turns):
        if not turn.is_action:
            continue
        earlier = trajectory.turns[:index]
        seen = set(_distinct_documents(earlier))
        new_silver = []
        for document in _distinct_documents([turn]):
            if document in silver and document not in seen:
                new_silver.append(document)
        repeated = _repeated(turn, earlier)
        correctness = 0.0
        if new_silver and repeated is None:
            weights = [silver[document] for document in new_silver]
            correctness = _correctness(weights, len(turn.documents), how)
        judgements[index] = Judgement(correctness, repeated, tuple(new_silver))
    return judgements


def _correctness(weights: Sequence[float], num_documents: int, how: str) -> float:
    """Return the correctness of a search, given the weights of its new silver documents, one or more."""
    if how == "fraction":
        return len(weights) / num_documents
    if how == "max":
        return max(weights)
    if how == "mean":
        return sum(weights) / num_documents
    raise ValueError(f"correctness is {how!r}; use fraction, max or mean")


def _distinct_documents(turns: Sequence[Turn]) -> list[str]:
    """Return the ids of the documents that these turns show, each once, in the order shown."""
    ids = [document.id for turn in turns for document in turn.documents]
    return list(dict.fromkeys(ids))


def _repeated(turn: Turn, earlier: Sequence[Turn]) -> str | None:
    """Name the first earlier turn that a turn repeats, or None. Documents are compared before thoughts."""
    documents = set(_distinct_documents([turn]))
    for number, other in enumerate(earlier, 1):
        shared = documents.intersection(_distinct_documents([other]))
        if len(shared) > _MAX_SHARED_DOCUMENTS:
            return f"documents of turn {number}"
    for number, other in enumerate(earlier, 1):
        if is_repetition(turn.think.split(), other.think.split()):
            return f"think of turn {number}"
    return None


def is_repetition(words: Sequence[str], earlier: Sequence[str]) -> bool:
    """Return whether one text repeats another one.

    It does if 1 - edit distance / length of the longer text > 0.5, where both are counted in words. The order
    of the two texts does not matter.

    Args:
        words: the words of one text; may be empty.
        earlier: the words of the other one; may be empty.

    Returns:
        False for two empty texts.
    """
    longer = max(len(words), len(earlier))
    largest_distance = (longer - 1) // 2  # the largest integer below half of the longer length
    if largest_distance < 0:
        return False
    return Levenshtein.distance(words, earlier, score_cutoff=largest_distance) <= largest_distance


# --- Variants of the authors' code ---


def _soften_variant(credit: GroupCredit, softening: str) -> GroupCredit:
    """Change the plainly softened advantages of search turns by aggressive, upper_limit or reset."""
    turns = [advantages.copy() for advantages in credit.turns]
    if softening == "reset":
        for position, index in _always_correct_searches(credit):
            turns[position][index] = min(0.0, turns[position][index])
        return replace(credit, turns=turns)
    largest_advantages = [float(advantages.max()) for advantages in credit.before if len(advantages)]
    best = max(largest_advantages, default=0.0)
    columns = zip(turns, credit.before, credit.softened, credit.correctness, strict=True)
    for advantages, before, softened, correctness in columns:  # each [K]
        if softening == "aggressive":
            is_correct = correctness >= _AGGRESSIVE_CORRECTNESS
            advantages[softened & (advantages < 0) & is_correct] = 0
        elif softening == "upper_limit":
            moved = before + (best - before) * correctness
            advantages[softened] = moved[softened]
    return replace(credit, turns=turns)


def _always_correct_searches(credit: GroupCredit) -> list[tuple[int, int]]:
    """Return trajectory and turn of the judged k-th searches, for each k where all are wholly correct."""
    by_number: dict[int, list[tuple[int, int]]] = {}  # k -> trajectory and turn of each k-th search
    for position, trajectory in enumerate(credit.group.trajectories):
        if credit.silver and trajectory.format_valid:
            for number, index in enumerate(search_turns(trajectory)):
                by_number.setdefault(number, []).append((position, index))
    searches: list[tuple[int, int]] = []
    for candidates in by_number.values():
        if all(credit.correctness[position][index] == 1 for position, index in candidates):
            searches += candidates
    return searches


@dataclass(frozen=True)
class _BalancedTurn:
    """A turn that is balanced together with others."""

    advantages: np.ndarray  # float64 [K]: those of its trajectory, which the balance changes in place
    index: int  # of the turn in its trajectory
    num_tokens: int  # sampled tokens of the turn


def _rebalance_variant(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Bring each set of turns that are balanced together to the target ratio."""
    rebalanced = []  # credit whose advantages are changed in place
    for credit in credits:
        turns = [advantages.copy() for advantages in credit.turns]
        rebalanced.append(replace(credit, turns=turns))
    # Number of the group (0 for all if the step is balanced together) and of the set -> the set's turns.
    balanced_sets: dict[tuple[int, int], list[_BalancedTurn]] = {}
    for number, credit in enumerate(rebalanced):
        group_number = number if config.rebalance_within == "group" else 0
        for trajectory, advantages in zip(credit.group.trajectories, credit.turns, strict=True):
            for index, set_number in _set_numbers(trajectory, config.rebalance_over).items():
                num_tokens = len(trajectory.turns[index].token_ids)
                turn = _BalancedTurn(advantages, index, num_tokens)
                balanced_sets.setdefault((group_number, set_number), []).append(turn)
    for balanced_turns in balanced_sets.values():
        values = [float(turn.advantages[turn.index]) for turn in balanced_turns]
        balanced = _balanced(values, [turn.num_tokens for turn in balanced_turns], config)
        for turn, value in zip(balanced_turns, balanced, strict=True):
            turn.advantages[turn.index] = value
    return rebalanced


def _set_numbers(trajectory: Trajectory, over: str) -> dict[int, int]:
    """Return for each balanced turn the number of its set; the other turns keep their advantage.

    `over` is `AdvantageConfig.rebalance_over`.
    """
    last = last_sampled_turn(trajectory)
    if last is None:
        return {}
    if over == "turn":
        numbers = {last: -1}
        for number, index in enumerate(search_turns(trajectory)):
            numbers[index] = number
        return numbers
    if over == "all":
        return {index: 0 for index in range(last + 1)}
    return {last: 0}


def _balanced(values: Sequence[float], num_tokens: Sequence[int], config: AdvantageConfig) -> list[float]:
    """Return the balanced advantages of a set of turns: those of one side scaled, or clipped.

    `values` and `num_tokens` hold the advantage and the number of sampled tokens of each turn.
    """
    positive, negative = _sums_over_tokens(values, num_tokens)
    if config.adjust == "clip":
        return _clipped(values, num_tokens, positive, config.target_ratio)
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return list(values)
    if config.rebalance_by == "tokens" and positive and negative:
        positive, negative = _sums_over_tokens(np.sign(values).tolist(), num_tokens)
    positive_factor, negative_factor = rebalance_factors(positive, negative, config)
    return [value * (positive_factor if value > 0 else negative_factor) for value in values]


def _sums_over_tokens(values: Sequence[float], num_tokens: Sequence[int]) -> tuple[float, float]:
    token_sums = [value * count for value, count in zip(values, num_tokens, strict=True)]
    return positive_negative_sums(token_sums)


def _clipped(
    values: Sequence[float], num_tokens: Sequence[int], positive: float, target_ratio: float
) -> list[float]:
    """Raise the advantages below -target_ratio × the mean positive advantage of a token to that limit.

    `positive` is the sum of the positive advantages over tokens. If no token has a positive advantage,
    nothing is clipped.
    """
    num_positive = 0  # tokens with a positive advantage
    for value, count in zip(values, num_tokens, strict=True):
        if value > 0:
            num_positive += count
    if num_positive == 0:
        return list(values)
    limit = -target_ratio * positive / num_positive
    return [max(value, limit) for value in values]


# --- Description ---


def variant_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section `advantage` whose value is not the paper's.

    Args:
        settings: the section's keys and values. A missing key counts as having the paper's value.

    Returns:
        The keys, with "adjust" last if its value is "clip"; an empty list for the paper's rule.
    """
    keys = []
    for key, value in _PAPER_SETTINGS.items():
        if settings.get(key, value) != value:
            keys.append(key)
    if settings.get("adjust") == "clip":
        keys.append("adjust")
    return keys


def describe_calibration(config: AdvantageConfig) -> list[str]:
    """Describe the two switches of the calibration and the keys that they read.

    Args:
        config: the section `advantage`.

    Returns:
        One line for the soft penalty and one for the rebalance.
    """
    penalty = "soft penalty OFF: search turns keep their trajectory's whole advantage"
    if config.soft_penalty:
        settings = _settings(config, "softening", "correctness", "silver_threshold")
        penalty = f"soft penalty ON: correctness reduces the negative advantage of a search turn ({settings})"
    balance = "rebalance OFF: answer turns keep their trajectory's whole advantage"
    if config.rebalance:
        settings = _settings(
            config, "rebalance_over", "rebalance_within", "rebalance_by", "rebalance_excess", "adjust"
        )
        balance = f"rebalance ON: |negative| / positive becomes {config.target_ratio:g} (lambda; {settings})"
    return [penalty, balance]


def _settings(config: AdvantageConfig, *keys: str) -> str:
    return ", ".join(f"{key}={getattr(config, key)}" for key in keys)
