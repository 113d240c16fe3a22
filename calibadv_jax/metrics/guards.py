"""Collapse guards: thresholds of metrics that stop a run or roll it back.

A policy collapses over a few steps; its thinks and its entropy show it before its reward does.
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

# Threshold of GuardsConfig -> its metric, and what a value beyond it means. A guard has the threshold's name
# without min_ or max_.
GUARDS = {
    "min_entropy": ("actor/entropy", "the policy is nearly deterministic"),
    "min_format_valid": ("reward/format_valid", "the policy left the format"),
    "max_think_repetition": ("rollout/think_repetition", "the policy repeats itself within a turn"),
    "max_sampled_perplexity": ("rollout/sampled_perplexity", "the policy samples improbable tokens"),
    "max_answer_ratio": ("advantage/answer/ratio_before", "wrong answers are far longer than right ones"),
}
RATE_KEYS = {"actor": "learner.optimizer.lr", "critic": "critic.optimizer.lr"}
NUMBERS = "numbers"  # the guard without a threshold: see `Guards`


@dataclass(frozen=True)
class Verdict:
    """Result of the guards for a step."""

    action: Literal["go_on", "stop", "rollback"]
    findings: list[str]  # a line for each guard that trips at this step
    metrics: dict[str, float]  # guard/<name>: 1 where the step is beyond an armed guard's threshold, else 0


class Guards:
    """Counts the steps in a row beyond each guard's threshold.

    The first step on the good side of its threshold arms a guard: a policy that has yet to learn the format
    has not collapsed. NaN counts from the start. A step without a guard's metric leaves the count.

    The guard of numbers has no threshold: after `patience_steps` steps in a row without a finite update, or
    one step after which the parameters are not finite, the run ends or, with rollback, goes back. Messages
    name the config key of the learning rate, `rate_key`.
    """

    def __init__(self, config: GuardsConfig, rate_key: str = RATE_KEYS["actor"]):
        self.config, self.rate_keys = config, RATE_KEYS | {"actor": rate_key}
        self.rollbacks = 0  # part of every seed of the steps that follow
        self.last_good_step = 0  # the newest step at which no armed guard was beyond its threshold
        self.is_broken = False  # the run must not go on from the newest step, nor save it
        self._streaks: dict[str, int] = {}  # of armed guards

    def check(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Check the metrics of the step that made the policy `step`; call it once a step, in order."""
        config = self.config
        flags, findings = self._check_numbers(step, metrics)
        self.is_broken = bool(findings)
        for threshold, (metric, cause) in GUARDS.items():
            side, _, name = threshold.partition("_")
            limit = getattr(config, threshold)
            if limit is None or metric not in metrics:
                continue
            value = metrics[metric]
            is_bad = not (value >= limit if side == "min" else value <= limit)  # NaN is always bad
            if not is_bad:
                self._streaks[name] = 0
            elif name in self._streaks or math.isnan(value):
                self._streaks[name] = self._streaks.get(name, 0) + 1
            flags[f"guard/{name}"] = float(is_bad and name in self._streaks)
            streak = self._streaks.get(name, 0)
            # It trips once; a rollback stays due if the last start ended before it went back.
            if streak == config.patience_steps or (
                streak > config.patience_steps and config.action == "rollback"
            ):
                if math.isnan(value):
                    cause = "the numbers of the policy are broken (NaN)"
                limits = f"{'below' if side == 'min' else 'above'} guards.{threshold}={limit:g}"
                times = f"for {config.patience_steps} step(s)"
                findings.append(f"step {step}: {cause} ({metric} {value:.4g}, {limits} {times})")
        if not any(self._streaks.values()):
            self.last_good_step = step
        if not findings or (config.action == "log" and not self.is_broken):
            return Verdict("go_on", findings, flags)
        may_roll_back = config.action == "rollback" and self.rollbacks < config.max_rollbacks
        return Verdict("rollback" if may_roll_back else "stop", findings, flags)

    def may_save(self, step: int, saved: Sequence[int], keep: int) -> bool:
        """Whether the run can go on from this step, and a checkpoint for a rollback stays.

        `saved` are the steps of the checkpoints, ascending, of which the newest `keep` stay.
        """
        good = [number for number in saved if number <= self.last_good_step < step]
        stays = not good or good[-1] in [*saved, step][-keep:]
        return not self.is_broken and (stays or self.config.action != "rollback")

    @property
    def in_doubt(self) -> bool:
        """Whether no update of the newest step was finite, so that it gets no checkpoint yet."""
        return self._streaks.get(NUMBERS, 0) > 0

    def _check_numbers(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Return the guard's flag, and its finding where the run must not go on."""
        trained = [part for part in RATE_KEYS if f"{part}/skipped" in metrics]
        if not trained:
            return {}, []
        lost = [part for part in trained if metrics[f"{part}/finite"] == 0]
        skipped = [part for part in trained if metrics[f"{part}/skipped"] == 1]
        streak = self._streaks[NUMBERS] = self._streaks.get(NUMBERS, 0) + 1 if lost or skipped else 0
        flags = {f"guard/{NUMBERS}": float(streak > 0)}
        if not lost and streak < self.config.patience_steps:
            return flags, []
        part = (lost or skipped)[0]
        owner = "" if part == "actor" else f" of the {part}"
        skips = f"no update{owner} was finite for {streak} steps"
        cause = f"the parameters{owner} are not finite" if lost else skips
        return flags, [f"step {step}: {cause}: training has diverged; lower {self.rate_keys[part]}"]

    def rolled_back(self, step: int) -> None:
        """Count again from 0, armed as before: the run continues from the checkpoint of `step`."""
        self.rollbacks += 1
        self.last_good_step = step
        self.is_broken, self._streaks = False, dict.fromkeys(self._streaks, 0)

    def state(self) -> dict[str, Any]:
        """Return plain JSON values for a checkpoint."""
        steps = {"rollbacks": self.rollbacks, "last_good_step": self.last_good_step}
        return steps | {"streaks": dict(self._streaks)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; guards that the config has switched off since are dropped."""
        self.rollbacks, self.last_good_step = state["rollbacks"], state["last_good_step"]
        on = [name.partition("_")[2] for name in GUARDS if getattr(self.config, name) is not None]
        self._streaks = {name: count for name, count in state["streaks"].items() if name in (*on, NUMBERS)}


def guard_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the guards' own metrics; without any sampled token they are left out.

    rollout/think_repetition: share of the 4-grams of tokens of all sampled turns that stood in the same turn
        before. Nearly all of a turn is its think, and a think that loops is never closed.
    rollout/sampled_perplexity: exp of the mean negative log-probability of the sampled tokens, under the
        sampler's policy at its temperature.
    """
    turns = [turn for group in groups for trajectory in group.attempts for turn in trajectory.turns]
    metrics = {}
    repeated, total = np.sum([(0, 0), *map(_repeated_ngrams, turns)], axis=0).tolist()
    if total:
        metrics["rollout/think_repetition"] = repeated / total
    if num_tokens := sum(len(turn.logprobs) for turn in turns):
        mean = math.fsum(float(np.sum(turn.logprobs, dtype=np.float64)) for turn in turns) / num_tokens
        metrics["rollout/sampled_perplexity"] = float(np.exp(-mean))
    return metrics


def _repeated_ngrams(turn: Turn) -> tuple[int, int]:
    """Return the number of a turn's n-grams that stood in it before, and of all its n-grams."""
    ids = np.asarray(turn.token_ids).astype(np.uint64)
    total = max(0, len(ids) - NGRAM + 1)
    hashes = np.zeros(total, np.uint64)
    for offset in range(NGRAM):
        hashes = hashes * _HASH_BASE + ids[offset : offset + total]  # modulo 2**64
    return total - len(np.unique(hashes)), total
