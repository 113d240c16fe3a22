"""CalibAdv (arXiv 2604.18235): advantages of an estimator, by default GRPO, calibrated turn by turn.

Silver documents are the documents that a group's best trajectories saw. A search is correct as far as it
newly shows some. Soft penalty: a losing trajectory's correct search gets a smaller negative advantage.
Rebalance: within a group the positive and negative advantage of the answer turns (the last sampled turns,
whatever their kind) is brought to a given ratio. Variants of the authors' code stand below the paper's rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Weights of a turn's good documents (at least one), number of all its documents -> correctness.
_CORRECTNESS: dict[str, Callable[[Sequence[float], int], float]] = {
    "fraction": lambda weights, count: len(weights) / count,
    "max": lambda weights, count: max(weights),
    "mean": lambda weights, count: sum(weights) / count,
}
_MAX_SHARED_DOCUMENTS = 1
_ENOUGH = 1 / 3  # correctness from which `aggressive` takes the whole penalty away
_PAPER = {
    "softening": "plain",
    "rebalance_over": "answer",
    "rebalance_within": "group",
    "rebalance_by": "advantage",
    "rebalance_excess": False,
}


# --- The rule ---


def calibrate(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Apply the calibrations that are switched on to the judged credit of a step."""
    if config.soft_penalty:
        credits = [_soften(credit) for credit in credits]
        if config.softening != "plain":
            credits = [_soften_variant(credit, config.softening) for credit in credits]
    if config.rebalance and any(key != "softening" for key in variant_keys(vars(config))):
        return _rebalance_variant(credits, config)
    return [_rebalance(credit, config) if config.rebalance else credit for credit in credits]


def _soften(credit: GroupCredit) -> GroupCredit:
    """Scale the negative advantages of search turns by 1 - correctness; answer turns keep theirs."""
    turns, softened = [], []
    columns = zip(credit.group.trajectories, credit.turns, credit.correctness, strict=True)
    for trajectory, advantages, correctness in columns:
        before_answer = np.arange(len(advantages)) < (last_sampled_turn(trajectory) or 0)
        is_softened = before_answer & (advantages < 0) & (correctness > 0)  # 0 where the turn is no search
        turns.append(np.where(is_softened, advantages * (1 - correctness), advantages))
        softened.append(is_softened)
    return replace(credit, turns=turns, softened=softened)


def _rebalance(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Rescale one side of the answer turns until |negative| / positive sum over their tokens is λ."""
    factors = rebalance_factors(*answer_turn_sums(credit.group, credit.answer_advantages()), config)
    turns = [advantages.copy() for advantages in credit.turns]
    for trajectory, advantages in zip(credit.group.trajectories, turns, strict=True):
        if (answer := last_sampled_turn(trajectory)) is not None:
            advantages[answer] *= factors[0 if advantages[answer] > 0 else 1]
    return replace(credit, turns=turns)


# --- Silver documents and correctness ---


@dataclass(frozen=True)
class Judgement:
    """The correctness of a turn by its group's silver documents, and its reason."""

    correctness: float = 0.0  # in [0, 1]
    repeated: str | None = None  # repeated part, "think of turn 1" or "documents of turn 2"; turns from 1
    found_silver: tuple[str, ...] = ()  # ids of its silver documents that no earlier turn saw, in its order


def judge(credit: GroupCredit, config: AdvantageConfig) -> GroupCredit:
    """Add the group's silver documents, and the correctness of each search by them."""
    silver = silver_documents(credit.group, config.silver_threshold)
    judged = [judge_turns(trajectory, silver, config.correctness) for trajectory in credit.group.trajectories]
    return replace(
        credit,
        silver=silver,
        correctness=[np.array([turn.correctness for turn in turns], np.float64) for turns in judged],
        repeated=[[turn.repeated for turn in turns] for turns in judged],
        found_silver=[[turn.found_silver for turn in turns] for turns in judged],
    )


def silver_documents(group: Group, threshold: float) -> dict[str, float]:
    """Return document id -> weight in (0, 1] of the documents that the group's best trajectories saw.

    Best: format valid, relative score >= `threshold` and score equal to the group's maximum. A document's
    weight is the number of best trajectories that saw it over the largest such number.
    """
    best = max(group.trajectories, key=lambda trajectory: trajectory.answer_score, default=None)
    if best is None or best.relative_score < threshold:
        return {}
    counts: Counter[str] = Counter()
    for trajectory in group.trajectories:
        if trajectory.format_valid and trajectory.answer_score == best.answer_score:
            ids = (document.id for turn in trajectory.turns for document in turn.documents)
            counts.update(dict.fromkeys(ids, 1))
    largest = max(counts.values(), default=1)
    return {document: count / largest for document, count in counts.items()}


def judge_turns(trajectory: Trajectory, silver: dict[str, float], how: str) -> list[Judgement]:
    """Judge each turn, length K; the judgement of a turn that is no action is empty.

    A search's good documents are silver and not seen before in the trajectory. It is worth 0 without any, or
    if it repeats an earlier turn: its think is more than half the same words in edit distance, or it shares
    two or more distinct documents. Nothing is judged in a format-invalid trajectory, nor without silver
    documents. `how` is AdvantageConfig.correctness.
    """
    judgements = [Judgement() for _ in trajectory.turns]
    if not silver or not trajectory.format_valid:
        return judgements
    for index, turn in enumerate(trajectory.turns):
        if turn.is_action:
            earlier = trajectory.turns[:index]
            seen = set().union(*map(_shown, earlier))
            good = tuple(document for document in _shown(turn) if document in silver and document not in seen)
            repeated = _repeated(turn, earlier)
            correctness = 0.0
            if good and repeated is None:
                weights = [silver[document] for document in good]
                correctness = _CORRECTNESS[how](weights, len(turn.documents))
            judgements[index] = Judgement(correctness, repeated, good)
    return judgements


def _shown(turn: Turn) -> dict[str, None]:
    return dict.fromkeys(document.id for document in turn.documents)  # an ordered set


def _repeated(turn: Turn, earlier: Sequence[Turn]) -> str | None:
    """Name the first earlier turn that a turn repeats, documents before thinks; None if there is none."""
    for number, other in enumerate(earlier, 1):
        if len(_shown(turn).keys() & _shown(other).keys()) > _MAX_SHARED_DOCUMENTS:
            return f"documents of turn {number}"
    for number, other in enumerate(earlier, 1):
        if is_repetition(turn.think.split(), other.think.split()):
            return f"think of turn {number}"
    return None


def is_repetition(words: Sequence[str], earlier: Sequence[str]) -> bool:
    """Return whether 1 - edit distance / longer length > 0.5, in words; two empty texts are no repetition."""
    limit = (max(len(words), len(earlier)) - 1) // 2  # the largest distance below half of the longer length
    return limit >= 0 and Levenshtein.distance(words, earlier, score_cutoff=limit) <= limit


# --- Variants of the authors' code ---


def _soften_variant(credit: GroupCredit, softening: str) -> GroupCredit:
    """Change the plainly softened advantages of search turns: aggressive, upper_limit or reset."""
    turns = [advantages.copy() for advantages in credit.turns]
    best = max((float(advantages.max()) for advantages in credit.before if len(advantages)), default=0.0)
    columns = zip(turns, credit.before, credit.softened, credit.correctness, strict=True)
    for advantages, before, softened, correctness in columns:
        if softening == "aggressive":
            advantages[softened & (advantages < 0) & (correctness >= _ENOUGH)] = 0
        elif softening == "upper_limit":
            advantages[softened] = (before + (best - before) * correctness)[softened]
    if softening == "reset":
        for position, index in _always_correct_searches(credit):
            turns[position][index] = min(0.0, turns[position][index])
    return replace(credit, turns=turns)


def _always_correct_searches(credit: GroupCredit) -> Iterator[tuple[int, int]]:
    """Yield trajectory and turn of the judged k-th searches, where all of them are wholly correct."""
    by_number: dict[int, list[tuple[int, int]]] = {}
    for position, trajectory in enumerate(credit.group.trajectories):
        if credit.silver and trajectory.format_valid:
            for number, index in enumerate(search_turns(trajectory)):
                by_number.setdefault(number, []).append((position, index))
    for places in by_number.values():
        if all(credit.correctness[position][index] == 1 for position, index in places):
            yield from places


def _rebalance_variant(credits: Sequence[GroupCredit], config: AdvantageConfig) -> list[GroupCredit]:
    """Bring each set of turns that are balanced together to the target ratio."""
    turns = [[advantages.copy() for advantages in credit.turns] for credit in credits]
    # Group (0: the step) and number -> for each turn its trajectory's advantages, its index, its tokens.
    sets: dict[tuple[int, int], list[tuple[np.ndarray, int, int]]] = {}
    for number, (credit, of_group) in enumerate(zip(credits, turns, strict=True)):
        group = number if config.rebalance_within == "group" else 0
        for trajectory, advantages in zip(credit.group.trajectories, of_group, strict=True):
            for index, key in _numbers(trajectory, config.rebalance_over).items():
                place = advantages, index, len(trajectory.turns[index].token_ids)
                sets.setdefault((group, key), []).append(place)
    for places in sets.values():
        values = [float(advantages[index]) for advantages, index, _ in places]
        balanced = _balanced(values, [tokens for *_, tokens in places], config)
        for (advantages, index, _), value in zip(places, balanced, strict=True):
            advantages[index] = value
    return [replace(credit, turns=of_group) for credit, of_group in zip(credits, turns, strict=True)]


def _numbers(trajectory: Trajectory, over: str) -> dict[int, int]:
    """Return by turn the number of the set in which it is balanced; other turns keep their advantage."""
    last = last_sampled_turn(trajectory)
    if last is None:
        return {}
    if over == "turn":
        return {last: -1} | {index: number for number, index in enumerate(search_turns(trajectory))}
    return dict.fromkeys(range(last + 1) if over == "all" else [last], 0)


def _balanced(values: Sequence[float], tokens: Sequence[int], config: AdvantageConfig) -> list[float]:
    """Rescale one side of the advantages of turns with these numbers of tokens, or clip them."""

    def sides(values: Sequence[float]) -> tuple[float, float]:
        return positive_negative_sums([value * count for value, count in zip(values, tokens, strict=True)])

    positive, negative = sides(values)
    if config.adjust == "clip":  # at -target_ratio × the mean positive advantage, if one is positive
        count = sum(count for value, count in zip(values, tokens, strict=True) if value > 0)
        return [max(value, -config.target_ratio * positive / count) if count else value for value in values]
    if config.rebalance_excess and negative <= positive * config.target_ratio:
        return list(values)
    if config.rebalance_by == "tokens" and positive and negative:
        positive, negative = sides(np.sign(values).tolist())
    factors = rebalance_factors(positive, negative, config)
    return [value * factors[0 if value > 0 else 1] for value in values]


# --- Description ---


def variant_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section `advantage` whose value is not the paper's; missing keys are."""
    keys = [key for key, value in _PAPER.items() if settings.get(key, value) != value]
    return keys + (["adjust"] if settings.get("adjust") == "clip" else [])


def describe_calibration(config: AdvantageConfig) -> list[str]:
    """Describe the two switches of the calibration and the keys that they read."""

    def settings(*keys: str) -> str:
        return ", ".join(f"{key}={getattr(config, key)}" for key in keys)

    penalty = "soft penalty OFF: search turns keep their trajectory's whole advantage"
    if config.soft_penalty:
        keys = settings("softening", "correctness", "silver_threshold")
        penalty = f"soft penalty ON: correctness reduces the negative advantage of a search turn ({keys})"
    balance = "rebalance OFF: answer turns keep their trajectory's whole advantage"
    if config.rebalance:
        keys = settings("rebalance_over", "rebalance_within", "rebalance_by", "rebalance_excess", "adjust")
        balance = f"rebalance ON: |negative| / positive becomes {config.target_ratio:g} (lambda; {keys})"
    return [penalty, balance]
