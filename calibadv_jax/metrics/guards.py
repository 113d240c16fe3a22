"""Collapse guards: thresholds of metrics that stop a run or roll it back.

A policy collapses over a few steps. Its thoughts and its entropy show this before its reward does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from calibadv_jax.config import GuardsConfig
from calibadv_jax.core.trajectory import Group, Turn

NGRAM = 4  # tokens
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers of it do not vanish modulo 2**64

# Threshold in GuardsConfig -> the guard's metric, and what a value beyond the threshold means. The guard is
# named like its threshold, without min_ or max_.
GUARDS = {
    "min_entropy": ("actor/entropy", "the policy is nearly deterministic"),
    "min_format_valid": ("reward/format_valid", "the policy left the format"),
    "min_answered": ("rollout/answered", "the policy avoids answers"),
    "max_answer_words": ("rollout/answer_words", "answers are padded with words"),
    "max_think_repetition": ("rollout/think_repetition", "the policy repeats itself within a turn"),
    "max_sampled_perplexity": ("rollout/sampled_perplexity", "the policy samples improbable tokens"),
    "max_answer_ratio": ("advantage/answer/ratio_before", "wrong answers are far longer than right ones"),
}
# Trained model, as in the names of its metrics -> config key of its learning rate.
RATE_KEYS = {"actor": "learner.optimizer.lr", "critic": "critic.optimizer.lr"}
NUMBERS = "numbers"  # name of the guard of finite numbers, which has no threshold: see `Guards`


@dataclass(frozen=True)
class Verdict:
    """Result of the guards for a step.

    Attributes:
        action: What the run must do.
        findings: A line for each guard that trips at this step.
        metrics: guard/<name>: 1 if the step is beyond the threshold of an armed guard, else 0.
    """

    action: Literal["go_on", "stop", "rollback"]
    findings: list[str]
    metrics: dict[str, float]


class Guards:
    """Counts the steps in a row beyond each guard's threshold.

    The first step within its threshold arms a guard: a policy that has yet to learn the format has not
    collapsed. NaN counts from the start. A step without the guard's metric does not change the count.

    The guard of numbers has no threshold. It trips after `guards.patience_steps` steps in a row without a
    finite update, or after one step that leaves parameters that are not finite. Then the run ends or, with
    rollback, goes back.

    Args:
        config: The section `guards`.
        rate_key: Config key of the policy's learning rate, for messages.

    Attributes:
        rollbacks: Number of rollbacks; it is part of every seed of the steps that follow.
        last_good_step: Newest step at which no armed guard was beyond its threshold.
        is_broken: Whether the run must neither go on from the newest step nor save it.
    """

    def __init__(self, config: GuardsConfig, rate_key: str = RATE_KEYS["actor"]):
        self.config = config
        self.rate_keys = {**RATE_KEYS, "actor": rate_key}
        self.rollbacks = 0
        self.last_good_step = 0
        self.is_broken = False
        self._streaks: dict[str, int] = {}  # steps in a row beyond the threshold, for each armed guard

    def check(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Return the verdict on a step; call it once a step, in order.

        Args:
            step: Version of the policy that the step made.
            metrics: Metrics of the step.
        """
        flags, findings = self._check_numbers(step, metrics)
        self.is_broken = bool(findings)
        for threshold, (metric, cause) in GUARDS.items():
            limit = getattr(self.config, threshold)
            if limit is None or metric not in metrics:
                continue
            name = threshold.partition("_")[2]
            value = metrics[metric]
            flags[f"guard/{name}"] = self._count(name, _is_within(threshold, value, limit), value)
            if self._is_tripped(name):
                findings.append(self._finding(step, threshold, metric, cause, value))
        if not any(self._streaks.values()):
            self.last_good_step = step
        is_only_logged = self.config.action == "log" and not self.is_broken
        if not findings or is_only_logged:
            return Verdict("go_on", findings, flags)
        may_roll_back = self.config.action == "rollback" and self.rollbacks < self.config.max_rollbacks
        return Verdict("rollback" if may_roll_back else "stop", findings, flags)

    def may_save(self, step: int, saved: Sequence[int], keep: int) -> bool:
        """Return whether a step may be saved.

        The run must be able to go on from it. With rollback, the newest checkpoint of a good step must not be
        deleted in its favour.

        Args:
            step: The step.
            saved: Steps of the checkpoints, ascending.
            keep: Number of checkpoints that are kept, newest first.
        """
        good_steps = [number for number in saved if number <= self.last_good_step < step]
        kept_steps = [*saved, step][-keep:]
        keeps_good_step = not good_steps or good_steps[-1] in kept_steps
        return not self.is_broken and (keeps_good_step or self.config.action != "rollback")

    @property
    def has_nonfinite_updates(self) -> bool:
        """Whether no update of the newest step was finite, so that it gets no checkpoint yet."""
        return self._streaks.get(NUMBERS, 0) > 0

    def _count(self, name: str, is_within: bool, value: float) -> float:
        """Count a step for a guard, and return its flag."""
        if is_within:
            self._streaks[name] = 0
        elif name in self._streaks or math.isnan(value):
            self._streaks[name] = self._streaks.get(name, 0) + 1
        return float(not is_within and name in self._streaks)

    def _is_tripped(self, name: str) -> bool:
        """Whether a guard trips at this step: once, or with rollback at every step of a longer streak.

        The streak is longer if the last start of the run ended before it went back.
        """
        streak = self._streaks.get(name, 0)
        patience = self.config.patience_steps
        return streak == patience or (streak > patience and self.config.action == "rollback")

    def _finding(self, step: int, threshold: str, metric: str, cause: str, value: float) -> str:
        if math.isnan(value):
            cause = "the numbers of the policy are broken (NaN)"
        direction = "below" if threshold.startswith("min_") else "above"
        limit = getattr(self.config, threshold)
        return (
            f"step {step}: {cause} ({metric} {value:.4g}, {direction} guards.{threshold}={limit:g} for"
            f" {self.config.patience_steps} step(s))"
        )

    def _check_numbers(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return the flag of the guard of numbers, and its finding where the run must not go on."""
        trained = [model for model in RATE_KEYS if f"{model}/skipped" in metrics]
        if not trained:
            return {}, []
        broken = [model for model in trained if metrics[f"{model}/finite"] == 0]
        skipped = [model for model in trained if metrics[f"{model}/skipped"] == 1]
        streak = 0
        if broken or skipped:
            streak = self._streaks.get(NUMBERS, 0) + 1
        self._streaks[NUMBERS] = streak
        flags = {f"guard/{NUMBERS}": float(streak > 0)}
        if not broken and streak < self.config.patience_steps:
            return flags, []
        model = (broken or skipped)[0]
        owner = "" if model == "actor" else f" of the {model}"
        if broken:
            cause = f"the parameters{owner} are not finite"
        else:
            cause = f"no update{owner} was finite for {streak} steps"
        return flags, [f"step {step}: {cause}: training has diverged; lower {self.rate_keys[model]}"]

    def reset_after_rollback(self, step: int) -> None:
        """Continue from the checkpoint of `step`: guards stay armed and count from 0."""
        self.rollbacks += 1
        self.last_good_step = step
        self.is_broken = False
        self._streaks = dict.fromkeys(self._streaks, 0)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON values."""
        return {
            "rollbacks": self.rollbacks,
            "last_good_step": self.last_good_step,
            "streaks": dict(self._streaks),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; guards that the config has switched off since then are dropped."""
        self.rollbacks = state["rollbacks"]
        self.last_good_step = state["last_good_step"]
        active = {NUMBERS}
        for threshold in GUARDS:
            if getattr(self.config, threshold) is not None:
                active.add(threshold.partition("_")[2])
        self._streaks = {name: streak for name, streak in state["streaks"].items() if name in active}


def _is_within(threshold: str, value: float, limit: float) -> bool:
    """Whether a value is within its limit; NaN never is."""
    return value >= limit if threshold.startswith("min_") else value <= limit


def guard_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the guards' own metrics; they are left out where no token was sampled.

    Demonstrations do not count, and continued turns count once.

    rollout/think_repetition: share of the n-grams (NGRAM tokens) of all sampled turns that stood in the same
        turn before. Nearly all of a turn is its thought, and a thought that repeats itself is never closed.
    rollout/sampled_perplexity: exp of the mean negative log-probability of the sampled tokens, under the
        sampler's policy at its temperature.
    """
    turns = [turn for group in groups for trajectory in group.attempts for turn in trajectory.new_turns]
    metrics = {}
    num_repeated = 0
    num_ngrams = 0
    for turn in turns:
        turn_repeated, turn_ngrams = _count_ngrams(turn)
        num_repeated += turn_repeated
        num_ngrams += turn_ngrams
    if num_ngrams:
        metrics["rollout/think_repetition"] = num_repeated / num_ngrams
    num_tokens = sum(len(turn.logprobs) for turn in turns)
    if num_tokens:
        turn_sums = [float(np.sum(turn.logprobs, dtype=np.float64)) for turn in turns]
        mean_logprob = math.fsum(turn_sums) / num_tokens
        metrics["rollout/sampled_perplexity"] = float(np.exp(-mean_logprob))
    return metrics


def _count_ngrams(turn: Turn) -> tuple[int, int]:
    """Return the number of a turn's n-grams that stood in it before, and of all its n-grams."""
    ids = np.asarray(turn.token_ids).astype(np.uint64)  # [M]
    num_ngrams = max(0, len(ids) - NGRAM + 1)
    hashes = np.zeros(num_ngrams, np.uint64)  # polynomial hash of each n-gram, modulo 2**64
    for offset in range(NGRAM):
        hashes = hashes * _HASH_BASE + ids[offset : offset + num_ngrams]
    return num_ngrams - len(np.unique(hashes)), num_ngrams
