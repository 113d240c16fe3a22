"""The result of every estimator: an advantage for each turn, spread over its sampled tokens; its metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.core.trajectory import Group, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig


@dataclass(frozen=True)
class ByToken:
    """An estimate for each sampled token of a trajectory: for each of its K turns float64 [N]."""

    turns: list[np.ndarray]


@dataclass(frozen=True)
class GroupCredit:
    """Credit of one group of G trajectories; trajectory i has K_i turns."""

    group: Group
    raw: np.ndarray  # float64 [G]: before any calibration; of its answer turn where turns differ
    before: list[np.ndarray]  # G × float64 [K_i]: the same of each turn
    turns: list[np.ndarray]  # G × float64 [K_i]: advantage of the sampled tokens of each turn, or its mean
    correctness: list[np.ndarray]  # G × float64 [K_i] in [0, 1]; 0 where a turn has none
    silver: dict[str, float] = field(default_factory=dict)  # document id -> weight in (0, 1]
    # The rest says why; [] where the algorithm does not judge turns.
    softened: list[np.ndarray] = field(default_factory=list)  # G × bool [K_i]: correctness made it smaller
    repeated: list[list[str | None]] = field(default_factory=list)  # G × [K_i], see calibadv.Judgement
    found_silver: list[list[tuple[str, ...]]] = field(default_factory=list)  # G × [K_i], newly found ids
    # G × [K_i] × float64 [N]: tokens' advantages less the turn's; [] where all tokens of a turn share it.
    offsets: list[list[np.ndarray]] = field(default_factory=list)

    def answer_advantages(self) -> list[float]:
        """Return the advantage of each trajectory's last sampled turn, length G; 0 where there is none."""
        last = map(last_sampled_turn, self.group.trajectories)
        pairs = zip(last, self.turns, strict=True)
        return [0.0 if index is None else float(turns[index]) for index, turns in pairs]


def credit_of(group: Group, estimate: Sequence[float | np.ndarray | ByToken] | np.ndarray) -> GroupCredit:
    """Make uncalibrated credit of an estimate.

    The estimate has for each trajectory its advantage, or float64 [K] with one a turn, or one a token.
    Raises ValueError if there is not one for each trajectory or each turn, or one is not finite.
    """
    if len(estimate) != len(group.trajectories):
        raise ValueError(f"{len(estimate)} advantages for {len(group.trajectories)} trajectories")
    raw, before, offsets = np.zeros(len(estimate)), [], []
    for position, (trajectory, advantage) in enumerate(zip(group.trajectories, estimate, strict=True)):
        length = len(trajectory.turns)
        if isinstance(advantage, ByToken):
            values = np.array([math.fsum(tokens) / max(1, len(tokens)) for tokens in advantage.turns])
            offsets.append([tokens - mean for tokens, mean in zip(advantage.turns, values, strict=True)])
        else:
            values = np.asarray(advantage, np.float64)
        if values.shape not in ((), (length,)):
            raise ValueError(f"advantages of shape {values.shape} for a trajectory of {length} turns")
        if not np.isfinite(values).all():
            raise ValueError(f"advantage {values.tolist()} is not finite")
        before.append(np.full(length, values))
        if values.ndim == 0:
            raw[position] = values
        elif (last := last_sampled_turn(trajectory)) is not None:
            raw[position] = values[last]
    turns = [advantages.copy() for advantages in before]
    correctness = [np.zeros(len(advantages)) for advantages in before]
    return GroupCredit(group, raw, before, turns, correctness, offsets=offsets)


def last_sampled_turn(trajectory: Trajectory) -> int | None:
    """Return the index of the last turn with sampled tokens, CalibAdv's answer turn; None: there is none."""
    return last_filled([turn.token_ids for turn in trajectory.turns])


def last_filled(token_ids: Sequence[Sequence[int] | np.ndarray]) -> int | None:
    """Return `last_sampled_turn`, given the sampled tokens of each turn."""
    return next((index for index in reversed(range(len(token_ids))) if len(token_ids[index])), None)


def sampled_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns up to the last sampled one; none where nothing was sampled."""
    last = last_sampled_turn(trajectory)
    return [] if last is None else trajectory.turns[: last + 1]


def search_turns(trajectory: Trajectory) -> list[int]:
    """Return the indices of the searches, and of other actions, before the last sampled turn."""
    last = last_sampled_turn(trajectory) or 0
    return [index for index in range(last) if trajectory.turns[index].is_action]


def broadcast_to_tokens(credit: GroupCredit) -> list[np.ndarray]:
    """Lay credit over tokens, float32 [T] for each trajectory's `response_ids`; observations get 0."""
    advantages = []
    for position, (trajectory, turns) in enumerate(zip(credit.group.trajectories, credit.turns, strict=True)):
        parts = [np.zeros(0)]
        for index, turn in enumerate(trajectory.turns):
            offset = credit.offsets[position][index] if credit.offsets else 0.0
            sampled = np.full(len(turn.token_ids), turns[index]) + offset
            parts += [sampled, np.zeros(len(turn.observation_ids))]
        advantages.append(np.concatenate(parts).astype(np.float32))
    return advantages


def answer_turn_sums(group: Group, advantages: Sequence[float]) -> tuple[float, float]:
    """Return `positive_negative_sums` over the tokens of the last sampled turns.

    `advantages` has one value for each trajectory of the group.
    """
    masses = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        index = last_sampled_turn(trajectory)
        if index is not None:
            masses.append(advantage * len(trajectory.turns[index].token_ids))
    return positive_negative_sums(masses)


def positive_negative_sums(masses: Sequence[float]) -> tuple[float, float]:
    """Return the positive sum and the magnitude of the negative sum, each exact to one rounding."""
    return math.fsum(mass for mass in masses if mass > 0), -math.fsum(mass for mass in masses if mass < 0)


def side_factors(positive: float, negative: float, config: AdvantageConfig) -> tuple[float, float]:
    """Return factors for both sides that bring their masses to the target ratio; 0 if a side is empty."""
    if positive == 0 or negative == 0:
        return 0.0, 0.0
    if config.adjust == "positive":
        return negative / (positive * config.target_ratio), 1.0
    return 1.0, config.target_ratio * positive / negative


# --- Metrics of a step ---


def summarise(credits: Sequence[GroupCredit]) -> dict[str, float]:
    """Return the metrics of a step (`metrics/catalogue.yaml`); a mean or ratio over nothing is left out."""
    return {f"advantage/{name}": value for name, value in (_turns(credits) | _groups(credits)).items()}


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float]:
    return {name: float(np.mean(values))} if len(values) else {}


def _groups(credits: Sequence[GroupCredit]) -> dict[str, float]:
    groups = [credit.group.trajectories for credit in credits if credit.group.trajectories]
    scores = [np.array([trajectory.relative_score for trajectory in group]) for group in groups]
    before = [answer_turn_sums(credit.group, credit.raw.tolist()) for credit in credits]
    after = [answer_turn_sums(credit.group, credit.answer_advantages()) for credit in credits]
    sizes = [len(credit.silver) for credit in credits]
    one_sided = [(positive == 0) != (negative == 0) for positive, negative in before]
    metrics = (
        _mean("groups/all_wrong_share", [bool(np.all(group == 0)) for group in scores])
        | _mean("groups/all_right_share", [bool(np.all(group >= 1)) for group in scores])
        | _mean("groups/one_sided_share", one_sided)
        | _mean("silver/group_share", [size > 0 for size in sizes])
        | _mean("silver/size_mean", [size for size in sizes if size])
    )
    for when, masses in (("before", before), ("after", after)):
        positive, negative = (math.fsum(mass[side] for mass in masses) for side in (0, 1))
        metrics |= {f"answer/positive_{when}": positive, f"answer/negative_{when}": negative}
        if positive > 0:
            metrics[f"answer/ratio_{when}"] = negative / positive
    return metrics


def _turns(credits: Sequence[GroupCredit]) -> dict[str, float]:
    """Return the metrics of the turns up to each trajectory's last sampled one."""
    rows, skipped = [], 0
    for credit in credits:
        for position, trajectory in enumerate(credit.group.trajectories):
            last = last_sampled_turn(trajectory)
            skipped += last is None
            is_judged = bool(credit.silver) and trajectory.format_valid
            columns = [values[position] for values in (credit.before, credit.turns, credit.correctness)]
            for index, turn in enumerate(sampled_turns(trajectory)):
                kind = (index == last, index != last and turn.is_action, is_judged)
                rows.append((*kind, len(turn.token_ids), *(values[index] for values in columns)))
    flags, (tokens, before, after, correctness) = np.split(np.array(rows, np.float64).reshape(-1, 7).T, [3])
    is_answer, is_search, is_judged = flags.astype(bool)
    metrics = {"skipped_trajectories": float(skipped)}
    for place, is_there in (("search", ~is_answer), ("answer", is_answer)):
        metrics[f"tokens/{place}_positive"] = float(tokens[is_there & (after > 0)].sum())
        metrics[f"tokens/{place}_negative"] = float(tokens[is_there & (after < 0)].sum())
    if tokens.any():
        sampled = after[tokens > 0].tolist()
        metrics |= {"mean": float(np.average(after, weights=tokens))}
        metrics |= {"max": max(sampled), "min": min(sampled)}
    for when, advantages in (("before", before), ("after", after)):
        negative = positive_negative_sums((advantages * tokens)[is_search].tolist())[1]
        metrics[f"search/negative_{when}"] = negative + 0.0  # no -0
    metrics |= _mean("search/softened_share", (after > before)[is_search & (before < 0)])
    values = correctness[is_search & is_judged]
    bins = {
        "zero": values == 0,
        "to_one_third": (values > 0) & (values <= 1 / 3),
        "to_two_thirds": (values > 1 / 3) & (values <= 2 / 3),
        "to_one": values > 2 / 3,
    }
    metrics |= _mean("correctness/mean", values)
    for name, members in bins.items():
        metrics |= _mean(f"correctness/{name}_share", members)
    return metrics
