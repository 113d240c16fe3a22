"""Collapse guards: metrics that show a policy degenerating, and what is done about it.

A policy that collapses does so over a few steps, and its thinks and entropy show it before its reward does.
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

Action = Literal["go_on", "stop", "rollback"]


@dataclass(frozen=True)
class Guard:
    """One metric with the side of the threshold that is bad."""

    metric: str
    threshold: str  # field of GuardsConfig
    is_floor: bool  # below is bad; else above
    words: str  # what it says of the policy, for people

    def is_bad(self, value: float, limit: float) -> bool:
        """NaN is always bad."""
        return not (value >= limit if self.is_floor else value <= limit)


GUARDS = {
    "entropy": Guard(
        "actor/entropy",
        "min_entropy",
        True,
        "the policy is nearly deterministic: the trajectories of a group come out the same and teach nothing",
    ),
    "format_valid": Guard(
        "reward/format_valid",
        "min_format_valid",
        True,
        "the policy has left the format: hardly a trajectory is valid, and invalid trajectories earn nothing",
    ),
    "think_repetition": Guard(
        "rollout/think_repetition",
        "max_think_repetition",
        False,
        "the policy repeats itself within a turn",
    ),
    "sampled_perplexity": Guard(
        "rollout/sampled_perplexity",
        "max_sampled_perplexity",
        False,
        "the policy samples what it finds improbable itself: it is close to noise",
    ),
    "answer_ratio": Guard(
        "advantage/answer/ratio_before",
        "max_answer_ratio",
        False,
        "wrong answers have become far longer than right answers: almost only what not to say is learned",
    ),
}


RATE_KEYS = {"actor": "learner.optimizer.lr", "critic": "critic.optimizer.lr"}  # of what is trained
NUMBERS = "numbers"  # the guard that is always there: see `Guards`


@dataclass(frozen=True)
class Verdict:
    """What the guards say of a step."""

    action: Action
    findings: list[str]  # a line for each guard that trips at this step
    metrics: dict[str, float]  # guard/<name>: 1 where the step is beyond an armed guard's threshold, else 0


class Guards:
    """Counts, for every guard, the steps in a row that were beyond its threshold.

    A guard is armed by the first step on the good side of its threshold: a policy that has yet to learn the
    format has not collapsed. NaN counts from the start. A step without a guard's metric (nothing was trained,
    say) leaves it as it was.

    One more has no threshold, as no run can go on without it: after `patience` steps in a row of which no
    update was finite, or one after which the parameters are not, the run ends or, with rollback, goes back.

    Args:
        rate_key: config key of the learning rate, for messages.
    """

    def __init__(self, config: GuardsConfig, rate_key: str = "learner.optimizer.lr"):
        self.config, self.rate_key = config, rate_key
        self.rollbacks = 0  # to be mixed into every seed of the steps that follow
        self.last_good_step = 0  # the newest step at which no armed guard was beyond its threshold
        self.is_broken = False  # the run must not go on from the newest step, nor save it
        self._streaks: dict[str, int] = {}  # of armed guards

    def check(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Judges one step; to be called once a step, in order.

        Args:
            step: the number of the policy that the step made.
            metrics: of the step.
        """
        flags, findings = self._check_numbers(step, metrics)
        self.is_broken = bool(findings)
        for name, guard in GUARDS.items():
            limit = getattr(self.config, guard.threshold)
            if limit is None or guard.metric not in metrics:
                continue
            value = metrics[guard.metric]
            is_bad = guard.is_bad(value, limit)
            if not is_bad:
                self._streaks[name] = 0
            elif name in self._streaks or math.isnan(value):
                self._streaks[name] = self._streaks.get(name, 0) + 1
            flags[f"guard/{name}"] = float(is_bad and name in self._streaks)
            if self._is_tripped(self._streaks.get(name, 0)):
                findings.append(_finding(step, guard, value, limit, self.config.patience))
        if not any(self._streaks.values()):
            self.last_good_step = step
        return Verdict(self._action() if findings else "go_on", findings, flags)

    def _is_tripped(self, streak: int) -> bool:
        """Said once; but a rollback that is due stays so, where the last start ended before it went back."""
        patience = self.config.patience
        return streak == patience or (streak > patience and self.config.action == "rollback")

    def may_save(self, step: int, saved: Sequence[int], keep: int) -> bool:
        """Whether this step can be gone on from, and leaves the checkpoint to which a rollback would go back.

        Args:
            saved: steps of the checkpoints that are there, ascending, of which the newest `keep` stay.
        """
        good = [one for one in saved if one <= self.last_good_step < step]
        stays = not good or good[-1] in [*saved, step][-keep:]
        return not self.is_broken and (stays or self.config.action != "rollback")

    @property
    def in_doubt(self) -> bool:
        """Whether no update of the newest step was finite: what it left is worth no checkpoint yet."""
        return self._streaks.get(NUMBERS, 0) > 0

    def _check_numbers(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """The guard's flag, and its finding where the run must not go on."""
        trained = [part for part in RATE_KEYS if f"{part}/skipped" in metrics]
        if not trained:
            return {}, []
        lost = [part for part in trained if metrics[f"{part}/finite"] == 0]
        skipped = [part for part in trained if metrics[f"{part}/skipped"] == 1]
        is_lost, is_skipped = bool(lost), bool(skipped)
        streak = self._streaks[NUMBERS] = self._streaks.get(NUMBERS, 0) + 1 if is_lost or is_skipped else 0
        flags = {f"guard/{NUMBERS}": float(streak > 0)}
        if not is_lost and streak < self.config.patience:
            return flags, []
        part = (lost or skipped)[0]
        whose, key = ("", self.rate_key) if part == "actor" else (f" of the {part}", RATE_KEYS[part])
        what = f"the parameters{whose} are not finite"
        if not is_lost:
            what = f"no update{whose} was finite for {streak} steps"
        return flags, [f"step {step}: {what}: training has diverged; lower {key}"]

    def rolled_back(self, step: int) -> None:
        """The run continues from the checkpoint of `step`: counts again from 0, armed as before."""
        self.rollbacks += 1
        self.last_good_step = step
        self.is_broken, self._streaks = False, dict.fromkeys(self._streaks, 0)

    def state(self) -> dict[str, Any]:
        """Plain JSON values for a checkpoint."""
        return {
            "rollbacks": self.rollbacks,
            "last_good_step": self.last_good_step,
            "streaks": dict(self._streaks),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was called; guards that the config has switched off since are forgotten."""
        self.rollbacks, self.last_good_step = state["rollbacks"], state["last_good_step"]
        on = [name for name, guard in GUARDS.items() if getattr(self.config, guard.threshold) is not None]
        self._streaks = {name: count for name, count in state["streaks"].items() if name in (*on, NUMBERS)}

    def _action(self) -> Action:
        if self.config.action == "log" and not self.is_broken:
            return "go_on"
        if self.config.action == "rollback" and self.rollbacks < self.config.max_rollbacks:
            return "rollback"
        return "stop"


def _finding(step: int, guard: Guard, value: float, limit: float, patience: int) -> str:
    side = "below" if guard.is_floor else "above"
    times = f"for {patience} steps" if patience > 1 else "in this step"
    cause = guard.words if not math.isnan(value) else "the numbers of the policy are broken (NaN)"
    limits = f"{side} guards.{guard.threshold}={limit:g} {times}"
    return f"step {step}: {cause} ({guard.metric} {value:.4g}, {limits})"


def guard_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What the guards need beyond a step's other metrics; a metric without any sampled token is left out.

    rollout/think_repetition: of the 4-grams of tokens of each sampled turn, the share that stood in the same
        turn before; over all turns. Nearly all of a turn is its think, and a think that loops is never
        closed, so that it is counted here and nowhere else.
    rollout/sampled_perplexity: exp of the mean negative log-probability of the sampled tokens, under the
        sampler's policy at its temperature.
    """
    turns = [turn for group in groups for trajectory in group.attempts for turn in trajectory.turns]
    metrics = {}
    counts = [_repeated_ngrams(turn) for turn in turns]
    repeated, total = sum(one for one, _ in counts), sum(all_of for _, all_of in counts)
    if total:
        metrics["rollout/think_repetition"] = repeated / total
    num_tokens = sum(len(turn.logprobs) for turn in turns)
    if num_tokens:
        mean = math.fsum(float(np.sum(turn.logprobs, dtype=np.float64)) for turn in turns) / num_tokens
        metrics["rollout/sampled_perplexity"] = float(np.exp(-mean))
    return metrics


def _repeated_ngrams(turn: Turn) -> tuple[int, int]:
    """How many of a turn's n-grams stood in it before, and how many it has."""
    ids = np.asarray(turn.token_ids).astype(np.uint64)
    total = max(0, len(ids) - NGRAM + 1)
    hashes = np.zeros(total, np.uint64)
    for offset in range(NGRAM):
        hashes = hashes * _HASH_BASE + ids[offset : offset + total]  # modulo 2**64
    return total - len(np.unique(hashes)), total
