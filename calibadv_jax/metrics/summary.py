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
    (their number), rollout/failed_share and rollout/failed/<service> only.

    Args:
        groups: at least one trajectory in all, finished or not.
        step: the version of the policy that they train, for their staleness.

    Raises:
        ValueError: no trajectories.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for group in groups for trajectory in group.failed]
    if not trajectories and not failed:
        raise ValueError("no trajectories to summarise")
    metrics = _failures(failed, len(trajectories) + len(failed))
    if not trajectories:
        return metrics
    metrics |= {
        **_rewards(trajectories),
        **_behaviour(trajectories),
        **_lengths(trajectories),
        **_groups([group for group in groups if group.trajectories]),
        **_staleness(trajectories, step),
    }
    for alias, name in ALIASES.items():
        if name in metrics:
            metrics[alias] = metrics[name]
        else:
            metrics |= {f"{alias}/{part}": metrics[f"{name}/{part}"] for part in ("mean", "max", "min")}
    return metrics


def _failures(failed: Sequence[Trajectory], total: int) -> dict[str, float]:
    reasons = Counter(str(trajectory.error).partition(":")[0] for trajectory in failed)
    return {
        "rollout/failed": float(len(failed)),
        "rollout/failed_share": len(failed) / total,
        **{f"rollout/failed/{reason}": float(count) for reason, count in sorted(reasons.items())},
    }


def _rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    return {
        **_spread("reward", [trajectory.answer_score for trajectory in trajectories]),
        "reward/format_valid": _mean(trajectory.format_valid for trajectory in trajectories),
        # A metric that a trajectory lacks does not apply to it.
        **{
            f"reward/{name}": _mean(t.metrics[name] for t in trajectories if name in t.metrics)
            for name in names
        },
    }


def _behaviour(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [len(trajectory.turns) for trajectory in trajectories]
    valid = [sum(turn.is_action or turn.kind == "answer" for turn in t.turns) for t in trajectories]
    return {
        **_spread("rollout/turns", turns),
        **_spread("rollout/searches", [trajectory.num_searches for trajectory in trajectories]),
        **_actions(trajectories),
        **_spread("timing_s/trajectory", [trajectory.seconds for trajectory in trajectories]),
        "rollout/valid_actions/mean": _mean(valid),
        "rollout/valid_action_ratio": _mean(v / n if n else 0.0 for v, n in zip(valid, turns, strict=True)),
        "rollout/answered": _mean(trajectory.answer is not None for trajectory in trajectories),
        "rollout/invalid": _mean(any(turn.kind == "invalid" for turn in t.turns) for t in trajectories),
        "rollout/refused_queries": float(sum(turn.is_refused for t in trajectories for turn in t.turns)),
        "rollout/truncated": _mean(
            any(turn.stop_reason == "length" for turn in t.turns) for t in trajectories
        ),
    }


def _actions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean turns of each action but search that was on in a trajectory."""
    names = dict.fromkeys(name for t in trajectories for name in t.actions if name != "search")
    return {
        f"rollout/actions/{name}": _mean(sum(turn.kind == name for turn in t.turns) for t in trajectories)
        for name in names
    }


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    masks = [trajectory.mask for trajectory in trajectories]
    sampled = [int(mask.sum()) for mask in masks]
    return {
        **_spread("rollout/prompt_length", [len(trajectory.prompt_ids) for trajectory in trajectories]),
        **_spread("rollout/response_length", [len(mask) for mask in masks]),
        **_spread("rollout/sampled_tokens", sampled),
        "rollout/sampled_tokens/total": float(sum(sampled)),
        "rollout/sampled_token_ratio": sum(sampled) / max(sum(map(len, masks)), 1),
    }


def _groups(groups: Sequence[Group]) -> dict[str, float]:
    scores = [[trajectory.answer_score for trajectory in group.trajectories] for group in groups]
    return {
        "group/best_score": _mean(max(members) for members in scores),
        "group/solved": _mean(any(t.relative_score >= 1 for t in group.trajectories) for group in groups),
        "group/tied": _mean(max(members) == min(members) for members in scores),
        "group/all_zero": _mean(max(members) == 0 for members in scores),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": _mean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values), dtype=np.float64))


def _staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    versions = [trajectory.policy_versions for trajectory in trajectories if trajectory.policy_versions]
    if not versions:
        return {}
    return {
        **_spread("rollout/staleness", [step - ascending[0] for ascending in versions]),
        "rollout/mixed_versions": _mean(len(ascending) > 1 for ascending in versions),
    }


def report_metrics(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Name an evaluation's means ``eval/<data source>/<metric>/<greedy or temperature_T>``.

    Args:
        means: by temperature, as text, then data source, then metric.
    """
    return {
        f"eval/{source}/{name}/{'greedy' if temperature == '0' else f'temperature_{temperature}'}": value
        for temperature, sources in means.items()
        for source, values in sources.items()
        for name, value in values.items()
    }
