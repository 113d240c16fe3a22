"""Scores of trajectories: answer reward times format validity, less a penalty on length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from calibadv_jax.config import RewardConfig
from calibadv_jax.config.sections.credit import JUDGE, JUDGE_AGREEMENT
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import Grammar, turn_flaw, whole_turn
from calibadv_jax.core.trajectory import Group, Trajectory
from calibadv_jax.core.user_functions import failure, import_user_function, is_address


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals any normalised golden answer, else 0.0."""
    return float(normalise_answer(prediction) in map(normalise_answer, golden_answers))


def cover_em(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if any normalised golden answer is a substring of the normalised prediction, else 0.0.

    A golden answer that normalises to nothing ("The") covers every prediction, as upstream.
    """
    normalised = normalise_answer(prediction)
    return float(any(golden in normalised for golden in map(normalise_answer, golden_answers)))


def f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """Return the best F1 in [0, 1] between the words of the prediction and those of a golden answer.

    Computed as 2·common / (predicted + golden words): one rounding, so that equal fractions are equal
    doubles, which the precision/recall form does not give. Two empty answers score 0.
    """
    words = Counter(normalise_answer(prediction).split())
    best = 0.0
    for golden in map(normalise_answer, golden_answers):
        golden_words = Counter(golden.split())
        common = (words & golden_words).total()
        if common:
            best = max(best, 2 * common / (words.total() + golden_words.total()))
    return best


# Name, as in reward.answer and the metric reward/NAME -> score of (prediction, golden answers), in [0, 1].
ANSWER_REWARDS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "cover_em": cover_em,
}
METRICS = (*ANSWER_REWARDS, JUDGE, JUDGE_AGREEMENT, "format", "format_valid", "overlong_penalty")
LOGGED_NAMES = (*METRICS, "mean", "max", "min")  # of reward/NAME


def format_flaw(trajectory: Trajectory) -> str:
    """Return the first reason for which a trajectory breaks the protocol; empty if it is valid.

    Valid: one or more turns that each sampled exactly think + the action that was executed and got an
    observation, then one answer turn that sampled exactly think + answer. A protocol tag inside a body (a
    forged observation, a second action) is invalid. The opening that the environment or the prompt wrote
    counts as sampled. Only sampled text and turn structure are judged, never a document.
    """
    for number, (turn, flaw) in enumerate(zip(trajectory.turns, turn_flaws(trajectory), strict=True), 1):
        if flaw:
            return f"turn {number}: {flaw}"
        if turn.is_action and not len(turn.observation_ids):
            return f"turn {number}: the action was not executed"
        if turn.kind == "answer" and number < len(trajectory.turns):
            return f"turn {number}: an answer before the last turn"
    if trajectory.answer is None:
        return "the last turn is not an answer"
    return "an answer without any action before it" if len(trajectory.turns) == 1 else ""


def turn_flaws(trajectory: Trajectory) -> list[str]:
    """Return for each turn why it is not exactly a thought and the element of its kind; empty if it is."""
    grammar = Grammar(trajectory.actions)
    return [
        turn_flaw(whole_turn(trajectory.opening_of(number), turn.text), turn.kind, grammar)
        for number, turn in enumerate(trajectory.turns)
    ]


def score_trajectory(trajectory: Trajectory, config: RewardConfig) -> Trajectory:
    """Set `format_valid`, `answer_score` and the metrics of ANSWER_REWARDS, format and users' own functions.

    With `config.overlong_penalty` the score is less by the metric of that name. The other metrics are the raw
    scores, not multiplied by format validity. A trajectory without an answer turn scores 0 everywhere. Raises
    UserError if a user's own function fails or a verdict is missing.
    """
    answer, golden_answers = trajectory.answer, trajectory.question.golden_answers
    scores = dict.fromkeys(ANSWER_REWARDS, 0.0)
    if answer is not None:
        scores = {name: reward(answer, golden_answers) for name, reward in ANSWER_REWARDS.items()}
    scores |= {metric_name(name): own_score(name, trajectory) for name in config.weights if is_address(name)}
    is_valid = not format_flaw(trajectory)
    score = _answer_reward(trajectory, scores, config) if is_valid or not config.format else 0.0
    if config.overlong_penalty:
        scores["overlong_penalty"] = overlong_penalty(int(trajectory.mask.sum()), config)
        score -= scores["overlong_penalty"]
    return replace(
        trajectory,
        format_valid=is_valid,
        answer_score=score,
        max_score=config.max_score,
        metrics=trajectory.metrics | scores | {"format": float(is_valid)},
    )


def metric_name(reward: str) -> str:
    """Return the reward's name in the log, behind reward/."""
    return reward.partition(":")[2] or reward


def _load_own(address: str) -> Callable[..., float]:
    return import_user_function(address, "reward.answer", ("trajectory",), "reward(trajectory) -> float")


def own_score(address: str, trajectory: Trajectory) -> float:
    """Return the score by a user's own function; raise UserError if it fails or gives no finite number."""
    function, question = _load_own(address), trajectory.question.id
    try:
        score = float(function(trajectory))
    except Exception as error:  # a function of the user's own may raise anything
        place = f"{address} failed on an answer to question {question!r}: {failure(error)}"
        raise UserError(f"reward.answer: {place}; it must return a number for every trajectory") from error
    if not math.isfinite(score):
        place = f"{address} gave {score} for an answer to question {question!r}"
        raise UserError(f"reward.answer: {place}; it must return a finite number")
    return score


def _answer_reward(trajectory: Trajectory, scores: Mapping[str, float], config: RewardConfig) -> float:
    if JUDGE in config.weights and trajectory.answer is not None and JUDGE not in trajectory.metrics:
        raise UserError(
            "reward.answer names judge, but nobody has judged these trajectories: only a run with"
            " reward.judge.url asks, while it samples"
        )
    scores = {JUDGE: trajectory.metrics.get(JUDGE, 0.0), **scores}
    return math.fsum(weight * scores[metric_name(name)] for name, weight in config.weights.items())


def check_reward(config: RewardConfig) -> list[str]:
    """Describe the reward; empty where it is a built-in comparison.

    Raises UserError if a user's own function cannot be loaded, or two rewards have the same name.
    """
    names = [metric_name(name) for name in config.weights]
    for address in filter(is_address, config.weights):
        _load_own(address)
        name = metric_name(address)
        if name in LOGGED_NAMES or names.count(name) > 1:
            fault = f"would be logged as reward/{name}, which is another metric's name"
            raise UserError(f"reward.answer: {address} {fault}; rename the function")
    lines = []
    if config.judge.url:
        lines.append(f"judge ON: {config.judge.model} at {config.judge.url} is asked about every answer")
    if not isinstance(config.answer, str) or config.answer not in ANSWER_REWARDS:
        terms = " + ".join(f"{weight:g} × {name}" for name, weight in config.weights.items())
        lines.append(f"reward of an answer: {terms}")
    return lines


def overlong_penalty(sampled: int, config: RewardConfig) -> float:
    """Return the penalty of `sampled` tokens: linear from 0 at `overlong_from` to all at `overlong_until`."""
    share = (sampled - config.overlong_from) / (config.overlong_until - config.overlong_from)
    return config.overlong_penalty * min(1.0, max(0.0, share))


def text_scores(trajectory: Trajectory) -> dict[str, float]:
    """Score the answer or, where none is marked, the whole output."""
    text, golden_answers = trajectory.answer, trajectory.question.golden_answers
    if text is None:
        text = " ".join(turn.text for turn in trajectory.turns)
    return {f"text_{name}": ANSWER_REWARDS[name](text, golden_answers) for name in ("f1", "cover_em")}


def trajectory_scores(group: Group, config: RewardConfig) -> list[float]:
    """Return the score of each trajectory of a group, before `config.shuffle`."""
    return [score_trajectory(trajectory, config).answer_score for trajectory in group.trajectories]


def score_groups(groups: Sequence[Group], config: RewardConfig, rng: np.random.Generator) -> list[Group]:
    """Score every trajectory that has not failed.

    With `config.shuffle`, a control experiment, the pairs (answer_score, format_valid) are then permuted with
    `rng` over all trajectories of the step; the metrics stay true. Otherwise `rng` is not drawn from.
    """
    scored = [score_trajectory(trajectory, config) for group in groups for trajectory in group.trajectories]
    if config.shuffle:
        sources = [scored[index] for index in rng.permutation(len(scored))]
        scored = [
            replace(trajectory, answer_score=source.answer_score, format_valid=source.format_valid)
            for trajectory, source in zip(scored, sources, strict=True)
        ]
    remaining = iter(scored)
    return [replace(group, trajectories=[next(remaining) for _ in group.trajectories]) for group in groups]
