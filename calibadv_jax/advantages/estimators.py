"""Estimators of advantages, their registry (`ESTIMATORS`), and the advantage stage (`compute_advantages`).

An estimator is composed of a baseline, which looks at one group, and a spread, which looks at all groups of
the step; or it rewards turns, besides GRPO's advantage; or it is a function of its own. Values are float64 on
the host. Every sum is exact to one rounding, so the order of trajectories and groups does not matter.
Formulas and sources: docs/credit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from calibadv_jax.advantages.calibadv import (
    calibrate,
    describe_calibration,
    judge,
    judge_turns,
    silver_documents,
)
from calibadv_jax.advantages.credit import (
    ByToken,
    GroupCredit,
    broadcast_to_tokens,
    credit_of,
    sampled_turns,
    search_turns,
)
from calibadv_jax.advantages.step_metrics import advantage_metrics
from calibadv_jax.core.answers import holds_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.core.user_functions import failure, import_user_function, load_optional

if TYPE_CHECKING:
    from calibadv_jax.config import AdvantageConfig

EPSILON = 1e-6  # added to a standard deviation
_VARIANCE = 1e-8  # added to a variance, where advantages are whitened
_CORRECTNESS_SHARE = 0.7  # querygroup: of a search's advantage; the rest is its trajectory's
_MIN_CORRECTNESS = 1e-6  # querygroup: of a search that found nothing new


@dataclass(frozen=True)
class ScoredGroup:
    """Scores and lengths of a group of G trajectories, at least one."""

    scores: np.ndarray  # float64 [G]
    tokens: np.ndarray  # int64 [G]: sampled ones
    max_score: float = 1.0  # largest answer reward


# By trajectory: one number, float64 [K] by turn, or one by token.
GroupEstimate = Sequence[float | np.ndarray | ByToken] | np.ndarray
Estimate = Sequence[GroupEstimate]
EstimateFunction = Callable[[Sequence[Group], "AdvantageConfig"], Estimate]  # of groups that are not empty
ByTurn = list[np.ndarray]  # by trajectory: float64 [n], its n turns up to the last sampled one, or fewer
Scored = Sequence[ScoredGroup]
GroupValues = Sequence[np.ndarray]  # by group: float64 [G]
Baseline = Callable[[ScoredGroup, "AdvantageConfig"], np.ndarray]  # -> float64 [G]: scores less a baseline
Normalizer = Callable[[Scored, GroupValues, "AdvantageConfig"], GroupValues]


def compose(baseline: Baseline, normalizer: Normalizer | None = None) -> EstimateFunction:
    """Return the estimator that takes these two steps, or the first alone."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        scored = [scored_group(group) for group in groups]
        values = [baseline(group, config) for group in scored]
        return values if normalizer is None else normalizer(scored, values, config)

    return estimate


def scored_group(group: Group) -> ScoredGroup:
    """Return scores and numbers of sampled tokens; ValueError where a score is not finite."""
    scores = np.array([trajectory.answer_score for trajectory in group.trajectories], np.float64)
    if not np.isfinite(scores).all():
        raise ValueError(f"question {group.question.id!r}: answer scores {scores.tolist()} are not finite")
    tokens = [sum(len(turn.token_ids) for turn in trajectory.turns) for trajectory in group.trajectories]
    return ScoredGroup(scores, np.array(tokens, np.int64), group.trajectories[0].max_score)


def is_tied(values: np.ndarray) -> bool:
    """Return whether two or more values are equal. Their rounded mean may differ from them by one ulp."""
    return len(values) > 1 and bool(values.min() == values.max())


def mean_and_std(scores: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation (n - 1); (0, 1) for a single score, (score, 0) for equal scores."""
    if len(scores) == 1:
        return 0.0, 1.0
    if is_tied(scores):
        return float(scores[0]), 0.0
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((scores - mean) ** 2) / (len(scores) - 1))


# --- Baselines ---


def group_mean_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the mean of the group; equal scores give exactly 0, a group of one keeps its score."""
    return group.scores - mean_and_std(group.scores)[0]


def leave_one_out_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the mean of the other trajectories of the group; a group of one keeps its score."""
    size = len(group.scores)
    return group_mean_baseline(group, config) * (size / (size - 1) if size > 1 else 1.0)


def length_weighted_mean_baseline(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Subtract the mean weighted by sampled tokens; a group of one keeps its score; 0 without tokens."""
    total = int(group.tokens.sum())
    if len(group.scores) == 1:
        return group.scores
    if is_tied(group.scores) or total == 0:
        return np.zeros(len(group.scores))
    return group.scores - math.fsum(group.tokens * group.scores) / total


def best_minus_second(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Give the best trajectory its score less the second best, the others 0; 0 in a group of one."""
    advantages = np.zeros(len(group.scores))
    if len(group.scores) > 1:
        second, best = np.sort(group.scores)[-2:]
        advantages[np.argmax(group.scores)] = best - second
    return advantages


def neutral(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Apply `group_mean_baseline`, but nearly right losers count as if they had scored 0.

    A loser is nearly right from advantage.score_threshold on.
    """
    as_if_wrong = 0.0 - mean_and_std(group.scores)[0]
    return np.where(_is_nearly_right(group, config), as_if_wrong, group_mean_baseline(group, config))


def acceptable(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    """Apply `group_mean_baseline`, where a loser of at least advantage.score_threshold gets 0."""
    return np.where(_is_nearly_right(group, config), 0.0, group_mean_baseline(group, config))


def _is_nearly_right(group: ScoredGroup, config: AdvantageConfig) -> np.ndarray:
    return (group_mean_baseline(group, config) < 0) & (
        group.scores / group.max_score >= config.score_threshold
    )


# --- Spreads ---


def normalize_by_std(groups: Scored, centred: GroupValues, config: AdvantageConfig) -> GroupValues:
    """Divide by the standard deviation of the group's or the step's scores, if advantage.normalize_std."""
    if not config.normalize_std:
        return centred
    if config.std_over == "group":
        stds = [mean_and_std(group.scores)[1] for group in groups]
    else:
        scores = np.concatenate([group.scores for group in groups])
        # Groups of one, which keep their score, would be divided by next to nothing where all are equal.
        stds = [1.0 if is_tied(scores) else mean_and_std(scores)[1]] * len(groups)
    return [values / (std + EPSILON) for values, std in zip(centred, stds, strict=True)]


def divide_by_nonzero_share(groups: Scored, centred: GroupValues, config: AdvantageConfig) -> GroupValues:
    """Divide by the share of the step's trajectories whose score is not 0."""
    scores = np.concatenate([group.scores for group in groups])
    factor = len(scores) / max(1, int(np.count_nonzero(scores)))
    return [values * factor for values in centred]


def whitened(groups: Scored, centred: GroupValues, config: AdvantageConfig) -> GroupValues:
    return whiten(centred, [group.tokens for group in groups])


def whiten(values: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return (value - mean) / sqrt(variance + 1e-8), values weighted by counts; 0 where all are equal."""
    joined, weights = np.concatenate([np.zeros(0), *values]), np.concatenate([np.zeros(0, int), *counts])
    total = int(weights.sum())
    if len(set(joined[weights > 0])) < 2:
        return [np.zeros(len(part)) for part in values]
    mean = math.fsum(weights * joined) / total
    variance = math.fsum(weights * (joined - mean) ** 2) / (total - 1)
    return [(part - mean) / math.sqrt(variance + _VARIANCE) for part in values]


grpo = compose(group_mean_baseline, normalize_by_std)


# --- Rewards by turn ---


def discounted_returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return each turn's reward plus the discounted ones of the turns after it."""
    sums = rewards.astype(np.float64)
    for index in reversed(range(len(sums) - 1)):
        sums[index] += discount * sums[index + 1]
    return sums


def standardised(values: ByTurn, labels: Sequence[Sequence[Hashable]], config: AdvantageConfig) -> ByTurn:
    """Return (value - mean) / (std + 1e-6) among a group's turns of one label; 0 for a turn that is alone."""
    joined = np.concatenate(values)
    by_label: dict[Hashable, list[int]] = {}
    for place, label in enumerate(chain.from_iterable(labels)):
        by_label.setdefault(label, []).append(place)
    results = np.zeros(len(joined))
    for places in by_label.values():
        if len(places) > 1:
            mean, std = mean_and_std(joined[places])
            results[places] = (joined[places] - mean) / (std + EPSILON if config.normalize_std else 1.0)
    return np.split(results, np.cumsum([len(turns) for turns in values])[:-1])


def normalize_by_turn_index(values: ByTurn, config: AdvantageConfig) -> ByTurn:
    """Standardise among the first turns, the second ones, and so on."""
    return standardised(values, [range(len(turns)) for turns in values], config)


def add_to_grpo(turn_rewards: Callable[[Group, AdvantageConfig], ByTurn]) -> EstimateFunction:
    """Return the estimator that adds advantage.turn_weight × these rewards to GRPO's advantage."""

    def estimate(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
        advantages = []
        for group, whole in zip(groups, grpo(groups, config), strict=True):
            turns = _each_turn(group, whole)
            for values, rewards in zip(turns, turn_rewards(group, config), strict=True):
                values[: len(rewards)] += config.turn_weight * rewards
            advantages.append(turns)
        return advantages

    return estimate


def _each_turn(group: Group, whole: GroupEstimate) -> ByTurn:
    pairs = zip(group.trajectories, whole, strict=True)
    return [np.full(len(trajectory.turns), value) for trajectory, value in pairs]


def gigpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare discounted scores among turns before which the environment showed the same."""
    returns, states = [], []
    for trajectory in group.trajectories:
        turns = sampled_turns(trajectory)
        rewards = np.zeros(len(turns))
        rewards[-1:] = trajectory.answer_score
        returns.append(discounted_returns(rewards, config.discount))
        states.append([None, *(turn.observation_ids.tobytes() for turn in turns[:-1])][: len(turns)])
    return standardised(returns, states, config)


def mt_grpo(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare among turns of one number whether a turn shows a golden answer."""
    golden, rewards = group.question.golden_answers, []
    for trajectory in group.trajectories:
        pages = [turn.documents for turn in sampled_turns(trajectory)[:-1]]
        shows = [any(holds_answer(f"{page.title}\n{page.text}", golden) for page in shown) for shown in pages]
        rewards.append(np.array(shows, np.float64))
    return normalize_by_turn_index(rewards, config)


def stepsearch(group: Group, config: AdvantageConfig) -> ByTurn:
    """Compare gain less redundancy of a turn and of those after it, among turns of one number.

    Gain: the share of the targets (the question's passages, or else the silver documents) that the turn newly
    shows. Redundancy: the share of its documents that an earlier turn showed.
    """
    targets = set(group.question.supporting_ids or silver_documents(group, config.silver_threshold))
    sums = []
    for trajectory in group.trajectories:
        seen: set[str] = set()
        rewards = []
        for turn in sampled_turns(trajectory)[:-1]:
            shown = {document.id for document in turn.documents}
            gain = len((shown - seen) & targets) / max(1, len(targets))
            rewards.append(gain - len(shown & seen) / max(1, len(shown)))
            seen |= shown
        sums.append(discounted_returns(np.array(rewards), config.discount))
    return normalize_by_turn_index(sums, config)


def querygroup(groups: Sequence[Group], config: AdvantageConfig) -> Estimate:
    """Give a judged search 0.7 × (correctness - mean) / (std + 1e-6) + 0.3 × its trajectory's advantage.

    Mean and standard deviation are over the judged searches of the group, where there are two or more.
    Other turns get their trajectory's advantage, which is GRPO's. By CalibAdv's authors.
    """
    estimate = []
    for group, whole in zip(groups, grpo(groups, config), strict=True):
        silver = silver_documents(group, config.silver_threshold)
        advantages = _each_turn(group, whole)
        judged: list[tuple[np.ndarray, int, float]] = []  # advantages of its trajectory, search, correctness
        for trajectory, turns in zip(group.trajectories, advantages, strict=True):
            if silver and trajectory.format_valid:
                judgements = judge_turns(trajectory, silver, config.correctness)
                for index in search_turns(trajectory):
                    judged.append((turns, index, judgements[index].correctness or _MIN_CORRECTNESS))
        values = np.array([correctness for *_, correctness in judged])
        mean, std = mean_and_std(values) if judged else (0.0, 1.0)
        for turns, index, correctness in judged:
            gain = (correctness - mean) / (std + EPSILON)
            turns[index] = _CORRECTNESS_SHARE * gain + (1 - _CORRECTNESS_SHARE) * turns[index]
        estimate.append(advantages)
    return estimate


# --- Generalised advantage estimation: a score set against a critic's values, token by token ---
# Only sampled tokens count: after the last one of a turn comes the first one of the next turn, whatever the
# environment showed in between. The score stands at the last sampled token.


def gae(groups: Sequence[Group], config: AdvantageConfig) -> list[list[ByToken]]:
    """Return the advantages of the sampled tokens, whitened over those of the step."""
    raw = [gae_and_returns(trajectory, config)[0] for group in groups for trajectory in group.trajectories]
    white = iter(whiten(raw, [np.ones(len(tokens), int) for tokens in raw]))
    return [[_by_turn(trajectory, next(white)) for trajectory in group.trajectories] for group in groups]


def _by_turn(trajectory: Trajectory, advantages: np.ndarray) -> ByToken:
    ends = np.cumsum([len(turn.token_ids) for turn in trajectory.turns])
    return ByToken(np.split(advantages, ends)[:-1])


def gae_and_returns(trajectory: Trajectory, config: AdvantageConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages before whitening, and the returns that the critic learns: both float64 [n]."""
    values = critic_values(trajectory).astype(np.float64)
    rewards = np.zeros(len(values))
    rewards[-1:] = trajectory.answer_score
    advantages = gae_advantages(rewards, values, config.discount, config.gae_lambda)
    return advantages, advantages + values


def critic_values(trajectory: Trajectory) -> np.ndarray:
    """Return the critic's values before the sampled tokens, float32 [n]; UserError if none were kept."""
    values = [turn.values for turn in trajectory.turns if turn.values is not None]
    if len(values) < len(trajectory.turns):
        raise UserError(
            f"question {trajectory.question.id!r}: no values of a critic were kept, which gae needs:"
            " only a run with advantage.name=gae or advantage.base=gae has a critic; choose another one"
        )
    return np.concatenate([np.zeros(0, np.float32), *values])


def gae_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> np.ndarray:
    """Return GAE, float64 [n]: `rewards` stand after each sampled token, `values` before it."""
    advantages = np.zeros(len(values))
    later = next_value = 0.0
    for index in reversed(range(len(values))):
        difference = rewards[index] + discount * next_value - values[index]
        later = advantages[index] = difference + discount * decay * later
        next_value = values[index]
    return advantages


# --- Registry ---


@dataclass(frozen=True)
class Estimator:
    function: EstimateFunction
    template: str  # right of "advantage = ", see `formula`
    by_turn: str = ""  # how turns get advantages of their own; empty: they share their trajectory's
    needs: str = ""  # a critic, or golden_logprobs under the policy "current" or "initial"; empty: neither
    judges: bool = False  # whether searches get a correctness by silver documents
    centred: str = "score - mean"  # divided by a standard deviation where the template has {scaled}

    @property
    def carried(self) -> str:
        return self.by_turn or "every sampled token of a trajectory carries the trajectory's advantage"

    def formula(self, config: AdvantageConfig) -> str:
        """Return the right side of "advantage = " with these settings."""
        std = "std" if config.std_over == "group" else "std of the step's scores"
        scaled = f"({self.centred}) / ({std} + 1e-6)" if config.normalize_std else self.centred
        return self.template.format(scaled=scaled, config=config)


def _optional(name: str) -> EstimateFunction:
    """Return a function of `contrib.turn_estimators`, which the first call imports."""
    return lambda groups, config: getattr(load_optional("turn_estimators"), name)(groups, config)


_LOSERS = "{scaled}; below the mean but at least {config.score_threshold:g}: "
_BESIDE = "{scaled}, + {config.turn_weight:g} × of each turn: "
_WHITENED = "whitened over the sampled tokens of the step"
ESTIMATORS = {  # sources: docs/credit.md
    "grpo": Estimator(grpo, "{scaled}"),
    "dr_grpo": Estimator(compose(group_mean_baseline), "score - mean"),
    "grpo_neutral": Estimator(compose(neutral, normalize_by_std), _LOSERS + "as if the score were 0"),
    "grpo_acceptable": Estimator(compose(acceptable, normalize_by_std), _LOSERS + "0"),
    "grpo_passk": Estimator(
        compose(best_minus_second, normalize_by_std),
        "{scaled} for the best trajectory, 0 for the others",
        centred="best score - second best",
    ),
    "rloo": Estimator(compose(leave_one_out_baseline), "score - mean of the others"),
    "opo": Estimator(compose(length_weighted_mean_baseline), "score - mean weighted by sampled tokens"),
    "gpg": Estimator(
        compose(group_mean_baseline, divide_by_nonzero_share), "(score - mean) / share of nonzero scores"
    ),
    "reinforce_plus_plus": Estimator(compose(lambda group, _: group.scores, whitened), f"score, {_WHITENED}"),
    "reinforce_plus_plus_baseline": Estimator(
        compose(group_mean_baseline, whitened), f"score - mean, {_WHITENED}"
    ),
    "querygroup": Estimator(
        querygroup,
        "{scaled}; a judged search: 0.7 × its correctness, standardised in the group, + 0.3 × that",
        "searches are compared with each other, the other turns carry their trajectory's advantage",
        judges=True,
    ),
    "gigpo": Estimator(
        add_to_grpo(gigpo),
        _BESIDE + "the score × discount^(turns to the end), compared where the last observation is the same",
        "turns before which the environment showed the same are compared with each other too",
    ),
    "mt_grpo": Estimator(
        add_to_grpo(mt_grpo),
        _BESIDE + "whether it shows a golden answer, compared among turns of one number",
        "turns that show a golden answer get more",
    ),
    "stepsearch": Estimator(
        add_to_grpo(stepsearch),
        _BESIDE
        + "new less repeated target documents, of later turns too, compared among turns of one number",
        "searches that show new target documents (the question's passages, or else silver ones) get more",
    ),
    "igpo": Estimator(
        _optional("igpo"),
        "{scaled}, summed over the turns from it on; the last gain is the score, another's the rise of the"
        " golden answer's probability; mean and std are over all turns of the group",
        "turns are paid by how much they raise the golden answer's probability",
        needs="current",
        centred="gain - mean",
    ),
    "a2tgpo": Estimator(
        _optional("a2tgpo"),
        _BESIDE
        + "how much it raises the golden answer's probability, compared among turns of one number, summed"
        " over the turns from it on / root of their number",
        "turns that raise the golden answer's probability get more",
        needs="current",
    ),
    "tips": Estimator(
        _optional("tips"),
        _BESIDE + "how much it and later turns raise the golden answer's log-probability under the initial"
        " policy, compared among turns of one number",
        "turns that raise the initial policy's log-probability of the golden answer get more",
        needs="initial",
    ),
    "gae": Estimator(
        gae,
        "GAE: the score less the critic's value before the token, with gamma {config.discount:g} and lambda"
        f" {{config.gae_lambda:g}}, {_WHITENED}",
        "PPO with a critic; every sampled token has an advantage of its own; a turn shows the mean",
        needs="critic",
    ),
}


def find_estimator(config: AdvantageConfig) -> Estimator:
    """Return a registered estimator or a user's own; UserError if that cannot be loaded or called."""
    if config.estimator in ESTIMATORS:
        return ESTIMATORS[config.estimator]
    key = "advantage.base" if config.is_calibrated else "advantage.name"
    expected = (
        "def advantages(groups: Sequence[Group], config: AdvantageConfig) -> list[list[float | np.ndarray]],"
        " as in examples/own_advantage.py"
    )
    function = import_user_function(config.estimator, key, ("groups", "config"), expected)
    summary = (function.__doc__ or "the result of that function").strip().partition("\n")[0]
    return Estimator(function, summary.replace("{", "{{").replace("}", "}}"), "a function of your own")


# --- The advantage stage ---


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of a step, in the order of its groups and their trajectories."""

    advantages: list[list[np.ndarray]]  # float32 [T] like `Trajectory.response_ids`; 0 on observation tokens
    credits: list[GroupCredit]  # the same by turn, with correctness and silver documents
    metrics: dict[str, float]  # see `step_metrics.advantage_metrics`


def compute_advantages(groups: Sequence[Group], config: AdvantageConfig) -> AdvantageResult:
    """Compute the advantages of scored groups; statistics in float64 on the host.

    A trajectory without a sampled token gets 0 everywhere, but its score counts in its group. Failed ones do
    not count. If they leave a single one, it has nothing to be compared with: it gets 0, and its score does
    not count in statistics of the step. ValueError if a group mixes questions or an answer score is not
    finite, UserError if a user's function cannot be used.
    """
    for group in groups:
        for name in {trajectory.question.id for trajectory in group.trajectories} - {group.question.id}:
            raise ValueError(f"a trajectory of question {name!r} is in the group of {group.question.id!r}")
    credits = [credit_of(group, np.zeros(len(group.trajectories))) for group in groups]
    compared = [n for n, group in enumerate(groups) if len(group.trajectories) > (1 if group.failed else 0)]
    if compared:
        estimator, chosen = find_estimator(config), [groups[number] for number in compared]
        estimated = _estimate(estimator, chosen, config)
        if config.is_calibrated or estimator.judges:
            estimated = [judge(credit, config) for credit in estimated]
        if config.is_calibrated:
            estimated = calibrate(estimated, config)
        for number, credit in zip(compared, estimated, strict=True):
            credits[number] = credit
    return AdvantageResult(
        [broadcast_to_tokens(credit) for credit in credits], credits, advantage_metrics(credits)
    )


def _estimate(estimator: Estimator, groups: Sequence[Group], config: AdvantageConfig) -> list[GroupCredit]:
    if config.estimator in ESTIMATORS:
        estimate = estimator.function(groups, config)
        return [credit_of(group, values) for group, values in zip(groups, estimate, strict=True)]
    try:
        estimate = estimator.function(groups, config)
    except Exception as error:  # a function of the user's own may raise anything
        raise UserError(f"advantages: {config.estimator} failed: {failure(error)}; correct it") from error
    try:
        return [credit_of(group, values) for group, values in zip(groups, estimate, strict=True)]
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{config.estimator}: {error}; it must return one list for each group, with one number (or one"
            " array of a number a turn) for each trajectory, as in examples/own_advantage.py"
        ) from error


def judges(config: AdvantageConfig) -> bool:
    return config.is_calibrated or find_estimator(config).judges


def describe(config: AdvantageConfig) -> list[str]:
    """Describe the estimator and the calibration; UserError as `find_estimator`."""
    estimator = find_estimator(config)
    formula = f"advantage = {estimator.formula(config)}"
    probed = [
        "golden answers: a forward pass over every trajectory up to every turn computes, in every step, their"
        f" log-probabilities under the {policy} policy"
        for policy in config.probed
    ]
    if config.is_calibrated:
        head, lines = f"{config.base} calibrated by turn", describe_calibration(config)
    else:
        head, lines = estimator.carried, ["no CalibAdv calibration: advantage.name is not calibadv"]
    return [f"advantage {config.name}: {head}", formula, *lines, *probed]
