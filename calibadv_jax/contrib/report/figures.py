"""The figures of the report, in sections. Texts and units come from `metrics.catalogue`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from calibadv_jax.metrics import catalogue


@dataclass(frozen=True)
class Figure:
    """One figure. Metrics that no run logged are left out of it, and a figure without any is left out."""

    key: str  # names its anchor and its PNG file
    title: str
    text: str  # the values and how to read them
    unit: str
    metrics: Mapping[str, str]  # metric -> name of its line; a name ending in "*" stands for all that follow
    kind: Literal["lines", "stack"] = "lines"
    needs_rollouts: bool = False  # its values come from kept trajectories, not from metrics.jsonl
    from_zero: bool = True  # the axis starts at 0 where no value is negative
    cuts_spikes: bool = False  # the axis ends below rare values that are far larger than all others
    limit: str = ""  # config key of the guard's threshold on it


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    text: str
    figures: list[Figure] = field(default_factory=list)


def _figure(
    key: str,
    title: str,
    metrics: str | Mapping[str, str],
    note: str = "",
    unit: str = "",
    text: str = "",
    **options: object,
) -> Figure:
    """Return a figure whose text and unit are those of its metrics in the catalogue.

    Args:
        metrics: as of `Figure`, or the only one.
        note: how to read the values.
        unit, text: replace those of the catalogue.
    """
    lines = {metrics: ""} if isinstance(metrics, str) else metrics
    labels: dict[catalogue.Metric, list[str]] = {}
    for name, label in lines.items():
        if (entry := catalogue.find(name)) and not name.endswith("*"):
            labels.setdefault(entry, []).append(label)
    parts = [
        entry.meaning if len(names) == len(lines) else f"{' and '.join(names)}: {entry.meaning}"
        for entry, names in labels.items()
    ]
    if not text:
        unit, described = unit or next(iter(labels)).unit.strip("-"), "; ".join(parts)
        text = f"{described[0].upper()}{described[1:]}."
    return Figure(key, title, f"{text} {note}".rstrip(), unit, lines, **options)  # type: ignore[arg-type]


_COLD_START = [
    _figure("sft_loss", "Loss", "sft/loss"),
    _figure("sft_entropy", "Entropy", "sft/entropy"),
    _figure("sft_rate", "Learning rate", "sft/lr"),
    _figure("sft_tokens", "Tokens", "sft/tokens"),
]
_OUTCOME = [
    _figure("reward", "Reward", "reward/mean", "It should rise."),
    _figure("f1", "F1", "reward/f1"),
    _figure(
        "f1_by_source",
        "F1 by data source",
        "f1/*",
        unit="F1",
        text="Mean F1 of the trajectories of each data source.",
        needs_rollouts=True,
    ),
    _figure("exact", "Exact match", {"reward/em": "EM", "reward/cover_em": "cover EM"}),
    _figure(
        "format",
        "Valid format",
        "reward/format_valid",
        "It should go to 1; the reward falls with it.",
        limit="guards.min_format_valid",
    ),
    _figure("solved", "Best of the group", {"group/best_score": "best score", "group/solved": "solved"}),
    _figure(
        "evaluation_f1",
        "F1 on held-out questions",
        "eval_f1/*",
        unit="F1",
        text="Evaluations during the training, by temperature and data source.",
    ),
]
_BEHAVIOUR = [
    _figure(
        "entropy",
        "Entropy",
        "actor/entropy",
        "Falling to 0: it stops exploring. A steep rise often comes before a collapse.",
        limit="guards.min_entropy",
    ),
    _figure("searches", "Searches", "rollout/searches/mean"),
    _figure(
        "lengths",
        "Lengths",
        {"rollout/response_length/mean": "response", "rollout/sampled_tokens/mean": "sampled"},
    ),
    _figure("turns", "Turns", "rollout/turns/mean"),
    _figure(
        "endings",
        "How trajectories end",
        {"rollout/answered": "answered", "rollout/invalid": "invalid", "rollout/truncated": "truncated"},
    ),
    _figure(
        "repetition",
        "Repetition in thinks",
        "rollout/think_repetition",
        "A loop is close to 1.",
        limit="guards.max_think_repetition",
    ),
    _figure(
        "perplexity",
        "Perplexity of sampled tokens",
        "rollout/sampled_perplexity",
        "1 is deterministic; noise is far above.",
        from_zero=False,
        limit="guards.max_sampled_perplexity",
    ),
]
_CREDIT = [
    _figure(
        "mass_before",
        "Answer advantage before the calibration",
        {"advantage/answer/positive_before": "positive", "advantage/answer/negative_before": "negative"},
    ),
    _figure(
        "mass_after",
        "Answer advantage after the calibration",
        {"advantage/answer/positive_after": "positive", "advantage/answer/negative_after": "negative"},
        "Under CalibAdv the two are in the ratio advantage.target_ratio. Where right and wrong answers"
        " are equally long they are so from the start, and the figure hardly changes.",
    ),
    _figure(
        "search_mass",
        "Penalty of the searches",
        {"advantage/search/negative_before": "before", "advantage/search/negative_after": "after"},
        "CalibAdv takes away the part on searches that found silver documents.",
    ),
    _figure(
        "ratio",
        "Negative / positive",
        {"advantage/answer/ratio_before": "before", "advantage/answer/ratio_after": "after"},
        "CalibAdv brings it to advantage.target_ratio; GRPO leaves it.",
        limit="guards.max_answer_ratio",
    ),
    _figure("softened", "Softened queries", "advantage/search/softened_share"),
    _figure("silver_groups", "Groups with silver documents", "advantage/silver/group_share"),
    _figure("silver_size", "Silver documents", "advantage/silver/size_mean"),
    _figure(
        "correctness",
        "Correctness of searches",
        {
            "advantage/correctness/zero_share": "0",
            "advantage/correctness/to_one_third_share": "0 to 1/3",
            "advantage/correctness/to_two_thirds_share": "1/3 to 2/3",
            "advantage/correctness/to_one_share": "2/3 to 1",
        },
        unit="share",
        text="Histogram of the correctness of the judged search turns, step by step. The larger the"
        " correctness of a search, the smaller its penalty.",
        kind="stack",
    ),
    _figure(
        "groups",
        "Groups without a contrast",
        {
            "advantage/groups/all_wrong_share": "all wrong",
            "advantage/groups/all_right_share": "all right",
            "advantage/groups/one_sided_share": "one-sided",
        },
    ),
    _figure(
        "advantage_tokens",
        "Tokens with an advantage",
        {
            "advantage/tokens/search_positive": "search +",
            "advantage/tokens/search_negative": "search −",
            "advantage/tokens/answer_positive": "answer +",
            "advantage/tokens/answer_negative": "answer −",
        },
    ),
    _figure(
        "advantage_by_turn",
        "Advantage by turn",
        "turn_advantage/*",
        unit="advantage",
        text="Mean advantage of the search turns and of the answer turns, before and after the calibration.",
        needs_rollouts=True,
    ),
]
_LEARNER = [
    _figure("loss", "Loss", "actor/loss"),
    _figure(
        "grad_norm", "Gradient norm", "actor/grad_norm", "Spikes point at single batches that pull hard."
    ),
    _figure("kl", "Change within a step", "actor/ppo_kl"),
    _figure("clip", "Clipped tokens", "actor/pg_clipfrac"),
    _figure("kl_reference", "Distance to the reference", "actor/kl_loss"),
    _figure("rate", "Learning rate", "actor/lr"),
    _figure("packing", "Packing", {"actor/row_fill": "filled", "actor/computed_share": "computed"}),
]
_FRESHNESS = [
    _figure("staleness", "Staleness", {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest"}),
    _figure("mixed", "Mixed versions", "rollout/mixed_versions"),
    _figure(
        "mismatch",
        "Mismatch of sampler and learner",
        {"actor/sampler_mismatch": "trained", "rollout/probe_logprob_diff_mean": "fixed text"},
    ),
    _figure(
        "importance",
        "Importance weights",
        {"importance/p1": "1 %", "importance/p50": "50 %", "importance/p99": "99 %"},
        unit="ratio",
        text="Probability under the learner / under the sampler, of the sampled tokens: percentiles."
        " All at 1 where the two agree and nothing is stale.",
        needs_rollouts=True,
        from_zero=False,
    ),
]
_SPEED = [
    _figure(
        "phases",
        "Time by phase",
        "phase/*",
        unit="seconds",
        text="Seconds of a step, phases on top of each other; the rest is in no phase.",
        kind="stack",
        cuts_spikes=True,
    ),
    _figure("tokens_per_second", "Tokens a second", "perf/tokens_per_second"),
    _figure(
        "trajectory_seconds",
        "Seconds a trajectory",
        {"timing_s/trajectory/mean": "mean", "timing_s/trajectory/max": "slowest"},
        cuts_spikes=True,
    ),
]
_TROUBLE = [
    _figure("failures", "Failed trajectories", {"rollout/failed": "all", "rollout/failed/*": ""}),
    _figure("workers", "Workers", {"rollout/workers": "in use", "rollout/workers_lost": "lost"}),
    _figure(
        "guards", "Guards", "guard/*", unit="tripped", text="1 if a metric is beyond its guard's threshold."
    ),
    _figure("skipped", "Skipped updates", "actor/skipped"),
    _figure(
        "nonfinite",
        "Values that were not finite",
        "nonfinite_count",
        unit="metrics",
        text="Metrics of the step that were infinite or no number.",
    ),
]
SECTIONS = [
    Section("cold_start", "Cold start", "Supervised training on demonstrations.", _COLD_START),
    Section("outcome", "Does it learn?", "Scores of the training trajectories.", _OUTCOME),
    Section("behaviour", "What the policy does", "How it thinks, searches and ends.", _BEHAVIOUR),
    Section(
        "credit",
        "Credit assignment",
        "The advantage of each turn. Plain GRPO has no silver documents, and softens nothing.",
        _CREDIT,
    ),
    Section("learner", "Updates", "Loss, gradient and step size of the learner.", _LEARNER),
    Section(
        "freshness",
        "Sampler and learner",
        "Distance between the policy that sampled and the policy that is trained.",
        _FRESHNESS,
    ),
    Section("speed", "Speed", "Where the time goes.", _SPEED),
    Section(
        "trouble", "Failures and guards", "Failed trajectories, lost workers and tripped guards.", _TROUBLE
    ),
]
