"""What the report shows: one entry a figure, grouped into sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One figure. Metrics that no run logged are left out of it, and a figure without any is left out."""

    key: str  # names its anchor and its PNG file
    title: str
    text: str  # what is shown, and what to look for
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


def _one(key: str, title: str, text: str, unit: str, metric: str, **more: object) -> Figure:
    return Figure(key, title, text, unit, {metric: ""}, **more)  # type: ignore[arg-type]


_OUTCOME = [
    _one("reward", "Reward", "Mean answer score × format validity. It should rise.", "reward", "reward/mean"),
    _one("f1", "F1", "Mean F1 of the answers of the step's trajectories.", "F1", "reward/f1"),
    Figure(
        "f1_by_source",
        "F1 by data source",
        "Mean F1 of the trajectories of each data source.",
        "F1",
        {"f1/*": ""},
        needs_rollouts=True,
    ),
    Figure(
        "exact",
        "Exact match",
        "Share of answers that equal a golden answer (EM) or contain one (cover EM).",
        "share",
        {"reward/em": "EM", "reward/cover_em": "cover EM"},
    ),
    _one(
        "format",
        "Valid format",
        "Share of trajectories that keep to the format. It should go to 1; the reward falls with it.",
        "share",
        "reward/format_valid",
        limit="guards.min_format_valid",
    ),
    Figure(
        "solved",
        "Best of the group",
        "Mean of each group's best score, and share of groups with a right answer.",
        "share",
        {"group/best_score": "best score", "group/solved": "solved"},
    ),
    Figure(
        "evaluation_f1",
        "F1 on held-out questions",
        "Evaluations during the training, by temperature and data source.",
        "F1",
        {"eval_f1/*": ""},
    ),
]
_BEHAVIOUR = [
    _one(
        "entropy",
        "Entropy",
        "Of the policy over trained tokens. Falling to 0: it stops exploring. A steep rise often comes before"
        " a collapse.",
        "nats",
        "actor/entropy",
        limit="guards.min_entropy",
    ),
    _one(
        "searches", "Searches", "Mean number of searches a trajectory.", "searches", "rollout/searches/mean"
    ),
    Figure(
        "lengths",
        "Lengths",
        "Mean tokens a trajectory: of the whole response with its documents, and of what the policy wrote.",
        "tokens",
        {"rollout/response_length/mean": "response", "rollout/sampled_tokens/mean": "sampled"},
    ),
    _one("turns", "Turns", "Mean number of turns a trajectory.", "turns", "rollout/turns/mean"),
    Figure(
        "endings",
        "How trajectories end",
        "Shares that end with an answer, hold an invalid turn, or were cut at the length limit.",
        "share",
        {"rollout/answered": "answered", "rollout/invalid": "invalid", "rollout/truncated": "truncated"},
    ),
    _one(
        "repetition",
        "Repetition in thinks",
        "Share of a turn's 4-grams of tokens that stood in it before. A loop is close to 1.",
        "share",
        "rollout/think_repetition",
        limit="guards.max_think_repetition",
    ),
    _one(
        "perplexity",
        "Perplexity of what was sampled",
        "Under the policy that sampled it. 1 is deterministic; noise is far above.",
        "perplexity",
        "rollout/sampled_perplexity",
        from_zero=False,
        limit="guards.max_sampled_perplexity",
    ),
]
_CREDIT = [
    Figure(
        "mass_before",
        "Answer advantage before the calibration",
        "Sum of the positive and size of the negative advantage over the tokens of the answer turns.",
        "advantage × tokens",
        {"advantage/answer/positive_before": "positive", "advantage/answer/negative_before": "negative"},
    ),
    Figure(
        "mass_after",
        "Answer advantage after the calibration",
        "The same after it. Under CalibAdv the two are in the ratio advantage.target_ratio. Where right and"
        " wrong answers are equally long they are so from the start, and the figure hardly changes.",
        "advantage × tokens",
        {"advantage/answer/positive_after": "positive", "advantage/answer/negative_after": "negative"},
    ),
    Figure(
        "search_mass",
        "Penalty of the searches",
        "Size of the negative advantage over the tokens of the search turns, before and after the"
        " calibration. CalibAdv takes away what lies on searches that found silver documents.",
        "advantage × tokens",
        {"advantage/search/negative_before": "before", "advantage/search/negative_after": "after"},
    ),
    Figure(
        "ratio",
        "Negative / positive",
        "Ratio of the two masses. CalibAdv brings it to advantage.target_ratio; GRPO leaves it.",
        "ratio",
        {"advantage/answer/ratio_before": "before", "advantage/answer/ratio_after": "after"},
        limit="guards.max_answer_ratio",
    ),
    _one(
        "softened",
        "Softened queries",
        "Of the search turns with a negative advantage, the share whose penalty was made smaller because they"
        " found silver documents.",
        "share",
        "advantage/search/softened_share",
    ),
    _one(
        "silver_groups",
        "Groups with silver documents",
        "Share of groups whose best trajectories are good enough to say which documents are worth finding.",
        "share",
        "advantage/silver/group_share",
    ),
    _one(
        "silver_size",
        "Silver documents",
        "Mean number of silver documents in the groups that have any.",
        "documents",
        "advantage/silver/size_mean",
    ),
    Figure(
        "correctness",
        "Correctness of searches",
        "Histogram of the correctness of the judged search turns, step by step. Correctness is what a search"
        " is excused by.",
        "share",
        {
            "advantage/correctness/zero_share": "0",
            "advantage/correctness/to_one_third_share": "0 to 1/3",
            "advantage/correctness/to_two_thirds_share": "1/3 to 2/3",
            "advantage/correctness/to_one_share": "2/3 to 1",
        },
        kind="stack",
    ),
    Figure(
        "groups",
        "Groups without a contrast",
        "Shares of groups that are all wrong, all right, or one-sided (answer advantage of one sign only).",
        "share",
        {
            "advantage/groups/all_wrong_share": "all wrong",
            "advantage/groups/all_right_share": "all right",
            "advantage/groups/one_sided_share": "one-sided",
        },
    ),
    Figure(
        "advantage_tokens",
        "Tokens with an advantage",
        "Sampled tokens with a positive and a negative advantage, in search turns and in answer turns.",
        "tokens",
        {
            "advantage/tokens/search_positive": "search +",
            "advantage/tokens/search_negative": "search −",
            "advantage/tokens/answer_positive": "answer +",
            "advantage/tokens/answer_negative": "answer −",
        },
    ),
    Figure(
        "advantage_by_turn",
        "Advantage by turn",
        "Mean advantage of the search turns and of the answer turns, before and after the calibration.",
        "advantage",
        {"turn_advantage/*": ""},
        needs_rollouts=True,
    ),
]
_LEARNER = [
    _one("loss", "Loss", "Of the update, normalised by all trained tokens.", "loss", "actor/loss"),
    _one(
        "grad_norm",
        "Gradient norm",
        "Before clipping. Spikes point at single batches that pull hard.",
        "norm",
        "actor/grad_norm",
    ),
    _one(
        "kl",
        "Change within a step",
        "KL divergence between the policy that is trained and the policy at the start of the step.",
        "nats",
        "actor/ppo_kl",
    ),
    _one(
        "clip",
        "Clipped tokens",
        "Share of trained tokens whose gradient the clipping cut off.",
        "share",
        "actor/pg_clipfrac",
    ),
    _one("kl_reference", "Distance to the reference", "KL term of the loss.", "nats", "actor/kl_loss"),
    _one("rate", "Learning rate", "At the first update of the step.", "rate", "actor/lr"),
    Figure(
        "packing",
        "Packing",
        "Share of the places in the rows that hold a token, and share of the trained tokens that were"
        " computed: tokens without an advantage need not be.",
        "share",
        {"actor/row_fill": "filled", "actor/computed_share": "computed"},
    ),
]
_FRESHNESS = [
    Figure(
        "staleness",
        "Staleness",
        "Steps between the oldest policy that wrote a trajectory and the policy that it trains.",
        "steps",
        {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest"},
    ),
    _one(
        "mixed",
        "Mixed versions",
        "Share of trajectories that more than one version of the policy wrote.",
        "share",
        "rollout/mixed_versions",
    ),
    Figure(
        "mismatch",
        "Mismatch of sampler and learner",
        "Mean absolute difference of their log-probabilities: of the trained tokens, and of a fixed text"
        " after every swap of the weights.",
        "nats",
        {
            "actor/sampler_mismatch": "trained",
            "rollout/probe_logprob_diff_mean": "fixed text",
        },
    ),
    Figure(
        "importance",
        "Importance weights",
        "Probability under the learner / under the sampler, of the sampled tokens: percentiles. All at 1"
        " where the two agree and nothing is stale.",
        "ratio",
        {"importance/p1": "1 %", "importance/p50": "50 %", "importance/p99": "99 %"},
        needs_rollouts=True,
        from_zero=False,
    ),
]
_SPEED = [
    Figure(
        "phases",
        "Time by phase",
        "Seconds of a step, phases on top of each other; the rest is what no phase covers.",
        "seconds",
        {"phase/*": ""},
        kind="stack",
        cuts_spikes=True,
    ),
    _one(
        "tokens_per_second",
        "Tokens a second",
        "Trained tokens (prompts and documents included) a second of the whole step.",
        "tokens/s",
        "perf/tokens_per_second",
    ),
    Figure(
        "trajectory_seconds",
        "Seconds a trajectory",
        "From the first token to the end: the mean, and the slowest, which the step waits for.",
        "seconds",
        {"timing_s/trajectory/mean": "mean", "timing_s/trajectory/max": "slowest"},
        cuts_spikes=True,
    ),
]
_TROUBLE = [
    Figure(
        "failures",
        "Failed trajectories",
        "Trajectories that could not be finished, by who failed. They are not trained on.",
        "trajectories",
        {"rollout/failed": "all", "rollout/failed/*": ""},
    ),
    Figure(
        "workers",
        "Workers",
        "Sampling workers that took the step's weights, and workers lost since the trainer's start.",
        "workers",
        {"rollout/workers": "in use", "rollout/workers_lost": "lost"},
    ),
    Figure(
        "guards",
        "Guards",
        "1 if a metric is beyond its guard's threshold.",
        "tripped",
        {"guard/*": ""},
    ),
    _one(
        "skipped",
        "Skipped updates",
        "Share of updates whose gradient was not finite.",
        "share",
        "actor/skipped",
    ),
    _one(
        "nonfinite",
        "Values that were not finite",
        "Metrics of the step that were infinite or no number.",
        "metrics",
        "nonfinite_count",
    ),
]
_COLD_START = [
    _one(
        "sft_loss", "Loss", "Mean negative log-probability of the demonstrations' tokens.", "nats", "sft/loss"
    ),
    _one("sft_entropy", "Entropy", "Of the policy over the demonstrations' tokens.", "nats", "sft/entropy"),
    _one("sft_rate", "Learning rate", "At the step.", "rate", "sft/lr"),
    _one("sft_tokens", "Tokens", "Tokens trained on in the step.", "tokens", "sft/tokens"),
]

SECTIONS = [
    Section("cold_start", "Cold start", "Supervised training on demonstrations.", _COLD_START),
    Section("outcome", "Does it learn?", "Scores of the training trajectories.", _OUTCOME),
    Section("behaviour", "What the policy does", "How it thinks, searches and ends.", _BEHAVIOUR),
    Section(
        "credit",
        "Credit assignment",
        "Which turn deserved what. Plain GRPO has no silver documents, and softens nothing.",
        _CREDIT,
    ),
    Section("learner", "Updates", "What the learner did with it.", _LEARNER),
    Section(
        "freshness",
        "Sampler and learner",
        "How far the policy that wrote is from the policy that is trained.",
        _FRESHNESS,
    ),
    Section("speed", "Speed", "Where the time goes.", _SPEED),
    Section("trouble", "Failures and guards", "What went wrong, or nearly did.", _TROUBLE),
]
