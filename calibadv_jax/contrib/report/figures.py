"""The figures of the report, by section.

Text and unit of a figure are those of metrics/catalogue.yaml, unless they stand here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from calibadv_jax.metrics import catalogue


@dataclass(frozen=True)
class Figure:
    """One figure. Metrics that no run logged are left out of it, and a figure without any is left out."""

    key: str  # names its anchor and its PNG file
    title: str
    text: str  # the values and how to read them
    unit: str
    metrics: Mapping[str, str]  # metric -> name of its line; "*" stands for any text, which names the line
    from_zero: bool = True  # the axis starts at 0 where no value is negative
    cuts_spikes: bool = False  # the axis ends at twice the 95th percentile
    needs_rollouts: bool = False  # its values come from kept trajectories, the trainer does not log them


@dataclass(frozen=True)
class FigureSection:
    """Figures under a common heading."""

    title: str
    text: str
    figures: tuple[Figure, ...]


def _figure(
    key: str,
    title: str,
    metrics: str | Mapping[str, str],
    unit: str = "",
    text: str = "",
    note: str = "",
    from_zero: bool = True,
    cuts_spikes: bool = False,
    needs_rollouts: bool = False,
) -> Figure:
    """Return a figure.

    Args:
        key: names its anchor and its PNG file.
        title: its heading.
        metrics: a metric, or several with the names of their lines; a name with * stands for all that match.
        unit: unit of the axis; empty with `text`: that of the catalogue.
        text: what the values are; empty: what the catalogue says.
        note: how to read the values.
        from_zero: see `Figure`.
        cuts_spikes: see `Figure`.
        needs_rollouts: see `Figure`.
    """
    lines = {metrics: ""} if isinstance(metrics, str) else metrics
    if not text:
        unit, text = _catalogue_unit_and_text(lines)
    if note:
        text = f"{text} {note}"
    return Figure(key, title, text, unit, lines, from_zero, cuts_spikes, needs_rollouts)


def _catalogue_unit_and_text(lines: Mapping[str, str]) -> tuple[str, str]:
    """Return the unit of the first metric in the catalogue, and the meaning of all of them as a sentence."""
    labels: dict[catalogue.Metric, list[str]] = defaultdict(list)
    for name, label in lines.items():
        entry = catalogue.find_metric(name)
        if entry is not None:
            labels[entry].append(label)
    first = next(iter(labels))
    text = first.meaning
    if len(labels) > 1:
        meanings = [f"{' and '.join(names)}: {entry.meaning}" for entry, names in labels.items()]
        text = "; ".join(meanings)
    return first.unit.strip("-"), f"{text[0].upper()}{text[1:]}."


SECTIONS = {
    "cold_start": FigureSection(
        title="Cold start",
        text="Supervised training on demonstrations.",
        figures=(
            _figure(
                "sft_loss",
                title="Loss",
                metrics="sft/loss",
            ),
            _figure(
                "sft_entropy",
                title="Entropy",
                metrics="sft/entropy",
            ),
            _figure(
                "sft_rate",
                title="Learning rate",
                metrics="sft/lr",
            ),
            _figure(
                "sft_tokens",
                title="Tokens",
                metrics="sft/tokens",
            ),
        ),
    ),
    "outcome": FigureSection(
        title="Does it learn?",
        text="Scores of the training trajectories.",
        figures=(
            _figure(
                "reward",
                title="Reward",
                metrics="reward/mean",
                note="It should rise.",
            ),
            _figure(
                "f1",
                title="F1",
                metrics="reward/f1",
            ),
            _figure(
                "f1_by_source",
                title="F1 by data source",
                metrics="f1/*",
                unit="F1",
                text="Mean F1 of the trajectories of each data source.",
                needs_rollouts=True,
            ),
            _figure(
                "exact",
                title="Exact match",
                metrics={
                    "reward/em": "EM",
                    "reward/cover_em": "cover EM",
                },
            ),
            _figure(
                "format",
                title="Valid format",
                metrics="reward/format_valid",
                note="It should go to 1; the reward falls with it.",
            ),
            _figure(
                "solved",
                title="Best of the group",
                metrics={
                    "group/best_score": "best score",
                    "group/solved": "solved",
                },
            ),
            _figure(
                "demonstrations",
                title="Demonstrations in groups",
                metrics={
                    "demonstrations/score": "demonstrations",
                    "demonstrations/sampled_score": "sampled beside them",
                },
                note="The second should approach the first.",
            ),
            _figure(
                "demonstration_logprob",
                title="Demonstrations under the policy",
                metrics="demonstrations/logprob",
            ),
            _figure(
                "continuations",
                title="Continued near misses",
                metrics={
                    "continuations/score": "continued",
                    "continuations/source_score": "near misses",
                },
            ),
            _figure(
                "continuation_share",
                title="Groups with a continued near miss",
                metrics="continuations/group_share",
            ),
            _figure(
                "evaluation_f1",
                title="F1 on held-out questions",
                metrics="eval/*/f1/*",
                unit="F1",
                text="Evaluations during the training, by temperature and data source.",
            ),
        ),
    ),
    "behaviour": FigureSection(
        title="What the policy does",
        text="How it thinks, searches and ends.",
        figures=(
            _figure(
                "entropy",
                title="Entropy",
                metrics="actor/entropy",
                note="Falling to 0: it stops exploring. A steep rise often comes before a collapse.",
            ),
            _figure(
                "searches",
                title="Searches",
                metrics="rollout/searches/mean",
            ),
            _figure(
                "lengths",
                title="Lengths",
                metrics={
                    "rollout/response_length/mean": "response",
                    "rollout/sampled_tokens/mean": "sampled",
                },
            ),
            _figure(
                "turns",
                title="Turns",
                metrics="rollout/turns/mean",
            ),
            _figure(
                "endings",
                title="How trajectories end",
                metrics={
                    "rollout/answered": "answered",
                    "rollout/invalid": "invalid",
                    "rollout/truncated": "truncated",
                },
            ),
            _figure(
                "repetition",
                title="Repetition in thinks",
                metrics="rollout/think_repetition",
                note="A loop is close to 1.",
            ),
            _figure(
                "perplexity",
                title="Perplexity of sampled tokens",
                metrics="rollout/sampled_perplexity",
                note="1 is deterministic; noise is far above.",
                from_zero=False,
            ),
        ),
    ),
    "credit": FigureSection(
        title="Credit assignment",
        text="The advantage of each turn. Plain GRPO has no silver documents, and softens nothing.",
        figures=(
            _figure(
                "mass_before",
                title="Answer advantage before the calibration",
                metrics={
                    "advantage/answer/positive_before": "positive",
                    "advantage/answer/negative_before": "negative",
                },
            ),
            _figure(
                "mass_after",
                title="Answer advantage after the calibration",
                metrics={
                    "advantage/answer/positive_after": "positive",
                    "advantage/answer/negative_after": "negative",
                },
                note=(
                    "Under CalibAdv the two are in the ratio advantage.target_ratio. Where right and wrong"
                    " answers are equally long they are so from the start, and the figure hardly changes."
                ),
            ),
            _figure(
                "search_mass",
                title="Penalty of the searches",
                metrics={
                    "advantage/search/negative_before": "before",
                    "advantage/search/negative_after": "after",
                },
                note="CalibAdv takes away the part on searches that found silver documents.",
            ),
            _figure(
                "ratio",
                title="Negative / positive",
                metrics={
                    "advantage/answer/ratio_before": "before",
                    "advantage/answer/ratio_after": "after",
                },
                note="CalibAdv brings it to advantage.target_ratio; GRPO leaves it.",
            ),
            _figure(
                "softened",
                title="Softened queries",
                metrics="advantage/search/softened_share",
            ),
            _figure(
                "silver_groups",
                title="Groups with silver documents",
                metrics="advantage/silver/group_share",
            ),
            _figure(
                "silver_size",
                title="Silver documents",
                metrics="advantage/silver/size_mean",
            ),
            _figure(
                "correctness",
                title="Correctness of searches",
                metrics={
                    "advantage/correctness/zero_share": "0",
                    "advantage/correctness/to_one_third_share": "0 to 1/3",
                    "advantage/correctness/to_two_thirds_share": "1/3 to 2/3",
                    "advantage/correctness/to_one_share": "2/3 to 1",
                },
                unit="share",
                text=(
                    "Share of the judged search turns by their correctness. The larger the correctness of a"
                    " search, the smaller its penalty."
                ),
            ),
            _figure(
                "groups",
                title="Groups without a contrast",
                metrics={
                    "advantage/groups/all_wrong_share": "all wrong",
                    "advantage/groups/all_right_share": "all right",
                    "advantage/groups/one_sided_share": "one-sided",
                },
            ),
            _figure(
                "advantage_tokens",
                title="Tokens with an advantage",
                metrics={
                    "advantage/tokens/search_positive": "search +",
                    "advantage/tokens/search_negative": "search −",
                    "advantage/tokens/answer_positive": "answer +",
                    "advantage/tokens/answer_negative": "answer −",
                },
            ),
            _figure(
                "advantage_by_turn",
                title="Advantage by turn",
                metrics="turn_advantage/*",
                unit="advantage",
                text=(
                    "Mean advantage of the search turns and of the answer turns, before and after the"
                    " calibration."
                ),
                needs_rollouts=True,
            ),
        ),
    ),
    "learner": FigureSection(
        title="Updates",
        text="Loss, gradient and step size of the learner.",
        figures=(
            _figure(
                "loss",
                title="Loss",
                metrics="actor/loss",
            ),
            _figure(
                "grad_norm",
                title="Gradient norm",
                metrics="actor/grad_norm",
                note="Spikes point at single batches that pull hard.",
            ),
            _figure(
                "kl",
                title="Change within a step",
                metrics="actor/ppo_kl",
            ),
            _figure(
                "clip",
                title="Clipped tokens",
                metrics="actor/pg_clipfrac",
            ),
            _figure(
                "kl_reference",
                title="Distance to the reference",
                metrics="actor/kl_loss",
            ),
            _figure(
                "teacher",
                title="Reverse KL to the teacher",
                metrics="teacher/kl",
            ),
            _figure(
                "rate",
                title="Learning rate",
                metrics="actor/lr",
            ),
            _figure(
                "packing",
                title="Packing",
                metrics={
                    "actor/row_fill": "filled",
                    "actor/computed_share": "computed",
                },
            ),
        ),
    ),
    "freshness": FigureSection(
        title="Sampler and learner",
        text="Distance between the policy that sampled and the policy that is trained.",
        figures=(
            _figure(
                "staleness",
                title="Staleness",
                metrics={
                    "rollout/staleness/mean": "mean",
                    "rollout/staleness/max": "oldest",
                },
            ),
            _figure(
                "mixed",
                title="Mixed versions",
                metrics="rollout/mixed_versions",
            ),
            _figure(
                "mismatch",
                title="Mismatch of sampler and learner",
                metrics={
                    "actor/sampler_mismatch": "trained",
                    "rollout/probe_logprob_diff_mean": "fixed text",
                },
            ),
            _figure(
                "importance",
                title="Importance weights",
                metrics={
                    "importance/p1": "1 %",
                    "importance/p50": "50 %",
                    "importance/p99": "99 %",
                },
                unit="ratio",
                text=(
                    "Probability under the learner / under the sampler, of the sampled tokens: percentiles."
                    " All at 1 where the two agree and nothing is stale."
                ),
                from_zero=False,
                needs_rollouts=True,
            ),
        ),
    ),
    "speed": FigureSection(
        title="Speed",
        text="Where the time goes.",
        figures=(
            _figure(
                "phases",
                title="Time by phase",
                metrics={
                    "timing_s/step": "whole step",
                    "timing_s/rollout": "rollout",
                    "timing_s/probe": "probe",
                    "timing_s/values": "values",
                    "timing_s/advantage": "advantage",
                    "timing_s/update": "update",
                    "timing_s/record": "record",
                    "timing_s/publish": "publish",
                    "timing_s/evaluate": "evaluate",
                },
                unit="seconds",
                text="Seconds of a step and of its phases. The axis ends at twice the 95th percentile.",
                cuts_spikes=True,
            ),
            _figure(
                "tokens_per_second",
                title="Tokens a second",
                metrics="perf/tokens_per_second",
            ),
            _figure(
                "trajectory_seconds",
                title="Seconds a trajectory",
                metrics={
                    "timing_s/trajectory/mean": "mean",
                    "timing_s/trajectory/max": "slowest",
                },
                note="The axis ends at twice the 95th percentile.",
                cuts_spikes=True,
            ),
        ),
    ),
    "trouble": FigureSection(
        title="Failures and guards",
        text="Failed trajectories, lost workers and tripped guards.",
        figures=(
            _figure(
                "failures",
                title="Failed trajectories",
                metrics={
                    "rollout/failed": "all",
                    "rollout/failed/*": "by service",
                },
            ),
            _figure(
                "workers",
                title="Workers",
                metrics={
                    "rollout/workers": "in use",
                    "rollout/workers_lost": "lost",
                },
            ),
            _figure(
                "guards",
                title="Guards",
                metrics="guard/*",
                unit="tripped",
                text="1 if a metric is beyond its guard's threshold.",
            ),
            _figure(
                "skipped",
                title="Skipped updates",
                metrics="actor/skipped",
            ),
            _figure(
                "nonfinite",
                title="Values that were not finite",
                metrics="nonfinite_count",
                unit="metrics",
                text="Metrics of the step that were infinite or no number.",
            ),
        ),
    ),
}
FIGURES = [figure for section in SECTIONS.values() for figure in section.figures]
