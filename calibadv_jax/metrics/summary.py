"""Metrics of a batch of rollouts and of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from calibadv_jax.core.trajectory import Group, Trajectory

# The CalibAdv authors' names (their spelling) for values that have a clearer name here, so that curves can be
# compared with theirs. Each stands for the value <name>, or <name>/{mean,max,min}.
ALIASES = {
    "critic/score": "reward",
    "critic/formate_score/mean": "reward/format_valid",
    "env/number_of_actions": "rollout/turns",
    "env/number_of_valid_search": "rollout/searches/mean",
    "env/finish_ratio": "rollout/answered",
    "env/number_of_valid_action": "rollout/valid_actions/mean",
    "env/ratio_of_valid_action": "rollout/valid_action_ratio",
    "env/void_turn_ratio": "rollout/invalid",
    "response_length": "rollout/response_length",
    "response_length/clip_ratio": "rollout/truncated",
    "prompt_length": "rollout/prompt_length",
    "state_tokens/total": "rollout/sampled_tokens/total",
    "state_tokens/coverage": "rollout/sampled_token_ratio",
    "correct_rate/largest_ans_score": "group/best_score",
    "correct_rate/least_one_correct": "group/solved",
}


def trajectory_metrics(groups: Sequence[Group], step: int = 0) -> dict[str, float]:
    """Return scores, lengths (in tokens) and behaviour of a batch, after the reward stage.

    Names under "reward/" and "rollout/" average over trajectories, those under "group/" over questions.
    Shares lie in [0, 1]. The names in `ALIASES` repeat values. Failed trajectories count in rollout/failed
    (their number), rollout/failed_share and rollout/failed/<service> only. `step` is the version of the
    policy that they train, for their staleness. Raises ValueError without any trajectory.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for group in groups for trajectory in group.failed]
    if not trajectories and not failed:
        raise ValueError("no trajectories to summarise")
    reasons = Counter(str(trajectory.error).partition(":")[0] for trajectory in failed)
    metrics: dict[str, float] = {f"rollout/failed/{name}": float(reasons[name]) for name in sorted(reasons)}
    metrics["rollout/failed"] = float(len(failed))
    metrics["rollout/failed_share"] = len(failed) / (len(trajectories) + len(failed))
    if not trajectories:
        return metrics
    spreads = _spreads(trajectories, step)
    for name, values in spreads.items():
        metrics |= {f"{name}/mean": _mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
    means = _shares(trajectories) | _groups([group.trajectories for group in groups if group.trajectories])
    metrics |= {name: _mean(values) for name, values in means.items()}
    sampled, response = (sum(spreads[f"rollout/{name}"]) for name in ("sampled_tokens", "response_length"))
    metrics |= {
        "rollout/refused_queries": sum(turn.is_refused for t in trajectories for turn in t.turns),
        "rollout/sampled_tokens/total": sampled,
        "rollout/sampled_token_ratio": sampled / max(response, 1),
    }
    for alias, name in ALIASES.items():
        parts = [""] if name in metrics else ["/mean", "/max", "/min"]
        metrics |= {alias + part: metrics[name + part] for part in parts}
    return {name: float(value) for name, value in metrics.items()}


def _spreads(trajectories: Sequence[Trajectory], step: int) -> dict[str, list[float]]:
    """Return the values whose mean, maximum and minimum are logged."""
    masks = [trajectory.mask for trajectory in trajectories]
    values: dict[str, list[float]] = {
        "reward": [trajectory.answer_score for trajectory in trajectories],
        "rollout/turns": [len(trajectory.turns) for trajectory in trajectories],
        "rollout/searches": [trajectory.num_searches for trajectory in trajectories],
        "timing_s/trajectory": [trajectory.seconds for trajectory in trajectories],
        "rollout/prompt_length": [len(trajectory.prompt_ids) for trajectory in trajectories],
        "rollout/response_length": [len(mask) for mask in masks],
        "rollout/sampled_tokens": [int(mask.sum()) for mask in masks],
    }
    if versions := _versions(trajectories):
        values["rollout/staleness"] = [step - ascending[0] for ascending in versions]
    return values


def _shares(trajectories: Sequence[Trajectory]) -> dict[str, Iterable[float]]:
    """Return the values whose mean over trajectories is logged."""
    valid = [sum(turn.is_action or turn.kind == "answer" for turn in t.turns) for t in trajectories]
    values: dict[str, Iterable[float]] = {
        "reward/format_valid": (trajectory.format_valid for trajectory in trajectories),
        "rollout/valid_actions/mean": valid,
        "rollout/valid_action_ratio": (
            count / len(t.turns) if t.turns else 0.0 for count, t in zip(valid, trajectories, strict=True)
        ),
        "rollout/answered": (trajectory.answer is not None for trajectory in trajectories),
        "rollout/invalid": (any(turn.kind == "invalid" for turn in t.turns) for t in trajectories),
        "rollout/truncated": (any(turn.stop_reason == "length" for turn in t.turns) for t in trajectories),
    }
    # A metric that a trajectory lacks does not apply to it.
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        values[f"reward/{name}"] = [t.metrics[name] for t in trajectories if name in t.metrics]
    for name in dict.fromkeys(name for t in trajectories for name in t.actions if name != "search"):
        values[f"rollout/actions/{name}"] = [sum(u.kind == name for u in t.turns) for t in trajectories]
    if versions := _versions(trajectories):
        values["rollout/mixed_versions"] = [len(ascending) > 1 for ascending in versions]
    return values


def _versions(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    return [trajectory.policy_versions for trajectory in trajectories if trajectory.policy_versions]


def _groups(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Iterable[float]]:
    """Return the values whose mean over questions is logged."""
    scores = [[trajectory.answer_score for trajectory in group] for group in groups]
    return {
        "group/best_score": (max(members) for members in scores),
        "group/solved": (any(trajectory.relative_score >= 1 for trajectory in group) for group in groups),
        "group/tied": (max(members) == min(members) for members in scores),
        "group/all_zero": (max(members) == 0 for members in scores),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values), dtype=np.float64))


def report_metrics(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Name an evaluation's means ``eval/<data source>/<metric>/<greedy or temperature_T>``."""
    return {
        f"eval/{source}/{name}/{'greedy' if temperature == '0' else f'temperature_{temperature}'}": value
        for temperature, sources in means.items()
        for source, values in sources.items()
        for name, value in values.items()
    }
