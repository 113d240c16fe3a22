"""Metrics of a step's trajectories and of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from calibadv_jax.config.sections.rollout import TOOL_CALLS
from calibadv_jax.core.trajectory import Group, Trajectory

# Names of the CalibAdv authors (in their spelling) -> names of the same values here. Values are logged under
# both, so that curves can be compared with the authors'. A pair stands for the value <name>, or for the
# values <name>/mean, <name>/max and <name>/min.
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
    """Return scores, lengths and behaviour of a step's trajectories, after the reward stage.

    Names under "reward/" and "rollout/" are means over trajectories, those under "group/" over questions.
    Lengths are in tokens, shares are in [0, 1]. The names in `ALIASES` repeat values. Failed trajectories are
    counted in rollout/failed (their number), rollout/failed_share and rollout/failed/<service> only.
    Demonstrations and continued trajectories have metrics of their own, and count in no other than
    group/tied, which is about what is trained.

    Args:
        groups: Scored groups.
        step: Version of the policy that the trajectories train, for their staleness.

    Raises:
        ValueError: There is no trajectory, not even a failed one.
    """
    finished = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for group in groups for trajectory in group.failed]
    if not finished and not failed:
        raise ValueError("no trajectories to summarise")
    metrics = _failure_metrics(failed, len(finished) + len(failed))
    metrics.update(_demonstration_metrics(groups))
    metrics.update(_continuation_metrics(groups))
    trajectories = [trajectory for trajectory in finished if trajectory.is_from_prompt]
    if not trajectories:
        return metrics
    values_by_name = _values_with_extremes(trajectories, step)
    for name, values in values_by_name.items():
        metrics[f"{name}/mean"] = _mean(values)
        metrics[f"{name}/max"] = max(values)
        metrics[f"{name}/min"] = min(values)
    averaged_values = {**_averaged_values(trajectories), **_group_values(groups)}
    for name, averaged in averaged_values.items():
        metrics[name] = _mean(averaged)
    metrics["rollout/refused_queries"] = sum(
        turn.is_refused for trajectory in trajectories for turn in trajectory.turns
    )
    num_sampled = sum(values_by_name["rollout/sampled_tokens"])
    num_response = sum(values_by_name["rollout/response_length"])
    metrics["rollout/sampled_tokens/total"] = num_sampled
    metrics["rollout/sampled_token_ratio"] = num_sampled / max(num_response, 1)
    metrics.update(_aliased(metrics))
    return {name: float(value) for name, value in metrics.items()}


def _failure_metrics(failed: Sequence[Trajectory], num_trajectories: int) -> dict[str, float]:
    """Return the counts of failed trajectories among so many trajectories."""
    # An error begins with the name of the service that failed.
    counts = Counter(str(trajectory.error).partition(":")[0] for trajectory in failed)
    metrics: dict[str, float] = {}
    for service in sorted(counts):
        metrics[f"rollout/failed/{service}"] = float(counts[service])
    metrics["rollout/failed"] = float(len(failed))
    metrics["rollout/failed_share"] = len(failed) / num_trajectories
    return metrics


def _aliased(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under the CalibAdv authors' names."""
    aliased = {}
    for alias, name in ALIASES.items():
        suffixes = [""] if name in metrics else ["/mean", "/max", "/min"]
        for suffix in suffixes:
            aliased[alias + suffix] = metrics[name + suffix]
    return aliased


def _values_with_extremes(trajectories: Sequence[Trajectory], step: int) -> dict[str, list[float]]:
    """Return the values whose mean, maximum and minimum over trajectories are logged, by name."""
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
    versions = _policy_versions(trajectories)
    if versions:
        values["rollout/staleness"] = [step - ascending[0] for ascending in versions]
    return values


def _averaged_values(trajectories: Sequence[Trajectory]) -> dict[str, Sequence[float]]:
    """Return the values whose mean over trajectories is logged, by name."""
    num_valid_turns = [_num_valid_turns(trajectory) for trajectory in trajectories]
    valid_turn_ratios = []
    for num_valid, trajectory in zip(num_valid_turns, trajectories, strict=True):
        valid_turn_ratios.append(num_valid / len(trajectory.turns) if trajectory.turns else 0.0)
    values: dict[str, Sequence[float]] = {
        "reward/format_valid": [trajectory.format_valid for trajectory in trajectories],
        "rollout/valid_actions/mean": num_valid_turns,
        "rollout/valid_action_ratio": valid_turn_ratios,
        "rollout/answered": [trajectory.answer is not None for trajectory in trajectories],
        "rollout/invalid": [_num_turns_of_kind(trajectory, "invalid") > 0 for trajectory in trajectories],
        "rollout/truncated": [_has_truncated_turn(trajectory) for trajectory in trajectories],
    }
    answer_words = [_relative_answer_length(trajectory) for trajectory in trajectories if trajectory.answer]
    if answer_words:
        values["rollout/answer_words"] = answer_words
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        # A metric that a trajectory lacks does not apply to it.
        values[f"reward/{name}"] = [
            trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics
        ]
    for name in _other_actions(trajectories):
        values[f"rollout/actions/{name}"] = [
            _num_turns_of_kind(trajectory, name) for trajectory in trajectories
        ]
    if trajectories[0].protocol == TOOL_CALLS:
        values["rollout/calls"] = [_num_calls(trajectory) for trajectory in trajectories]
        values["rollout/parallel_calls"] = [_has_parallel_calls(trajectory) for trajectory in trajectories]
        values["rollout/closed_thoughts"] = [_num_closed_thoughts(trajectory) for trajectory in trajectories]
    versions = _policy_versions(trajectories)
    if versions:
        values["rollout/mixed_versions"] = [len(ascending) > 1 for ascending in versions]
    return values


def _num_valid_turns(trajectory: Trajectory) -> int:
    return sum(turn.is_action or turn.kind == "answer" for turn in trajectory.turns)


def _relative_answer_length(trajectory: Trajectory) -> float:
    """Return the words of an answer as a multiple of those of the golden answer nearest in length."""
    num_words = len(str(trajectory.answer).split())
    golden_lengths = [max(1, len(golden.split())) for golden in trajectory.question.golden_answers]
    nearest = min(golden_lengths, key=lambda length: abs(length - num_words))
    return num_words / nearest


def _num_turns_of_kind(trajectory: Trajectory, kind: str) -> int:
    return sum(turn.kind == kind for turn in trajectory.turns)


def _has_truncated_turn(trajectory: Trajectory) -> bool:
    return any(turn.stop_reason == "length" and not turn.is_closed_thought for turn in trajectory.turns)


def _num_calls(trajectory: Trajectory) -> int:
    return sum(len(turn.calls) for turn in trajectory.turns)


def _has_parallel_calls(trajectory: Trajectory) -> bool:
    return any(len(turn.calls) > 1 for turn in trajectory.turns)


def _num_closed_thoughts(trajectory: Trajectory) -> int:
    return sum(turn.is_closed_thought for turn in trajectory.turns)


def _other_actions(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the actions of the trajectories except search, each once, in order of their first occurrence."""
    names = []
    for trajectory in trajectories:
        for name in trajectory.actions:
            if name != "search" and name not in names:
                names.append(name)
    return names


def _policy_versions(trajectories: Sequence[Trajectory]) -> list[tuple[int, ...]]:
    """Return the ascending versions that wrote each trajectory, without trajectories that have none."""
    return [trajectory.policy_versions for trajectory in trajectories if trajectory.policy_versions]


def _group_values(groups: Sequence[Group]) -> dict[str, Sequence[float]]:
    """Return the values whose mean over questions is logged, by name."""
    trained_scores = []  # of all that is trained
    group_scores = []  # of what the policy sampled from the prompt
    is_solved = []
    for group in groups:
        if group.trajectories:
            trained_scores.append([trajectory.answer_score for trajectory in group.trajectories])
        sampled = group.from_prompt.trajectories
        if sampled:
            group_scores.append([trajectory.answer_score for trajectory in sampled])
            is_solved.append(any(trajectory.relative_score >= 1 for trajectory in sampled))
    return {
        "group/best_score": [max(scores) for scores in group_scores],
        "group/solved": is_solved,
        "group/tied": [max(scores) == min(scores) for scores in trained_scores],
        "group/all_zero": [max(scores) == 0 for scores in group_scores],
    }


def _demonstration_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the number and the scores of the demonstrations; nothing without any."""
    demonstrations: list[Trajectory] = []
    sampled_scores: list[float] = []  # of the other trajectories in the groups of the demonstrations
    num_groups = 0
    for group in groups:
        of_group = [trajectory for trajectory in group.trajectories if trajectory.is_demonstration]
        demonstrations.extend(of_group)
        if of_group:
            num_groups += 1
            sampled_scores.extend(trajectory.answer_score for trajectory in group.from_prompt.trajectories)
    if not demonstrations:
        return {}
    metrics = {
        "demonstrations/trajectories": float(len(demonstrations)),
        "demonstrations/group_share": num_groups / len(groups),
        "demonstrations/score": _mean([trajectory.answer_score for trajectory in demonstrations]),
        "demonstrations/searches": _mean([trajectory.num_searches for trajectory in demonstrations]),
    }
    if sampled_scores:
        metrics["demonstrations/sampled_score"] = _mean(sampled_scores)
    metrics.update(_mean_evidence("demonstrations", demonstrations))
    return metrics


def _continuation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the number and the scores of the continued trajectories; nothing without any."""
    continuations: list[Trajectory] = []
    source_scores = []  # of the trajectory that each of them continues
    num_groups = 0
    for group in groups:
        scores = {trajectory.index: trajectory.answer_score for trajectory in group.trajectories}
        of_group = [trajectory for trajectory in group.trajectories if trajectory.continues is not None]
        continuations.extend(of_group)
        if of_group:
            num_groups += 1
        for trajectory in of_group:
            if trajectory.continues in scores:
                source_scores.append(scores[trajectory.continues])
    if not continuations:
        return {}
    prefix_turns = [sum(turn.is_context for turn in trajectory.turns) for trajectory in continuations]
    metrics = {
        "continuations/trajectories": float(len(continuations)),
        "continuations/group_share": num_groups / len(groups),
        "continuations/score": _mean([trajectory.answer_score for trajectory in continuations]),
        "continuations/solved": _mean([trajectory.relative_score >= 1 for trajectory in continuations]),
        "continuations/prefix_turns": _mean(prefix_turns),
    }
    if source_scores:
        metrics["continuations/source_score"] = _mean(source_scores)
    metrics.update(_mean_evidence("continuations", continuations))
    return metrics


def _mean_evidence(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean evidence of those trajectories whose questions name passages, as NAME/evidence."""
    evidence = []
    for trajectory in trajectories:
        if "evidence" in trajectory.metrics:
            evidence.append(trajectory.metrics["evidence"])
    return {f"{name}/evidence": _mean(evidence)} if evidence else {}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values, dtype=np.float64))


def report_metrics(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return an evaluation's means under the names ``eval/<data source>/<metric>/<sampling>``.

    The sampling is ``greedy`` or ``temperature_T``.

    Args:
        means: Means by temperature, data source and metric.
    """
    metrics = {}
    for temperature, sources in means.items():
        sampling = "greedy" if temperature == "0" else f"temperature_{temperature}"
        for source, values in sources.items():
            for name, value in values.items():
                metrics[f"eval/{source}/{name}/{sampling}"] = value
    return metrics
