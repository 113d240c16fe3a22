"""Every metric that a run logs: name, unit, meaning, and what the CalibAdv authors call it.

``python -m scripts.document_metrics`` writes docs/metrics.md from it. In a name ``{a,b}`` stands for a and
for b, ``<word>`` for any text, which may hold slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from calibadv_jax.metrics.summary import ALIASES

SPREAD = "{mean,max,min}"


@dataclass(frozen=True)
class Metric:
    """One line of the page."""

    name: str
    unit: str
    meaning: str

    def names(self) -> list[str]:
        """The names with every ``{a,b}`` written out."""
        match = re.search(r"\{([^}]*)\}", self.name)
        if match is None:
            return [self.name]
        before, after = self.name[: match.start()], self.name[match.end() :]
        return [f"{before}{one}{after}" for one in match[1].split(",")]


SECTIONS: dict[str, tuple[Metric, ...]] = {
    "reward": (
        Metric(
            f"reward/{SPREAD}", "score", "answer score times format validity, as trained, over trajectories"
        ),
        Metric("reward/format_valid", "share", "trajectories that keep to the format"),
        Metric(
            "reward/format", "share", "the same before reward.shuffle, which permutes reward/format_valid"
        ),
        Metric("reward/em", "share", "answers that equal a golden answer, whatever the format"),
        Metric(
            "reward/f1", "score", "token F1 of the answers with the best golden answer, whatever the format"
        ),
        Metric("reward/overlong_penalty", "score", "what reward.overlong_penalty takes from a trajectory"),
        Metric("reward/judge", "score", "verdict of reward.judge on the answers, whatever the format"),
        Metric("reward/judge_agreement", "share", "answers on which reward.judge and reward/em say the same"),
        Metric("reward/cover_em", "share", "answers that contain a golden answer, whatever the format"),
    ),
    "group": (
        Metric("group/best_score", "score", "best reward of a question's trajectories, mean over questions"),
        Metric("group/solved", "share", "questions with at least one trajectory of the largest reward"),
        Metric(
            "group/tied", "share", "questions whose trajectories all have the same reward: they teach nothing"
        ),
        Metric("group/all_zero", "share", "questions without any reward"),
    ),
    "rollout": (
        Metric(f"rollout/turns/{SPREAD}", "turns", "sampled turns of a trajectory"),
        Metric(f"rollout/searches/{SPREAD}", "turns", "searches of a trajectory"),
        Metric("rollout/actions/<name>", "turns", "turns of a trajectory that call this action, if it is on"),
        Metric("rollout/valid_actions/mean", "turns", "turns of a trajectory that act or answer"),
        Metric("rollout/valid_action_ratio", "share", "the same as a share of the trajectory's turns"),
        Metric("rollout/answered", "share", "trajectories that end with an answer"),
        Metric("rollout/invalid", "share", "trajectories with a turn that is neither action nor answer"),
        Metric("rollout/truncated", "share", "trajectories with a turn that a length limit cut"),
        Metric("rollout/refused_queries", "turns", "actions whose query was not taken, in the step"),
        Metric(
            "rollout/overlong_prompts",
            "questions",
            "questions of data.train that data.overlong_prompts leaves out",
        ),
        Metric(
            "rollout/replaced_groups",
            "groups",
            "tied groups in whose place rollout.replace_tied asked other questions",
        ),
        Metric(
            "rollout/resting_questions",
            "questions",
            "questions that data.rest_below and rest_above leave out the next time",
        ),
        Metric(f"rollout/prompt_length/{SPREAD}", "tokens", "prompt of a trajectory"),
        Metric(f"rollout/response_length/{SPREAD}", "tokens", "sampled and observed tokens of a trajectory"),
        Metric(f"rollout/sampled_tokens/{SPREAD}", "tokens", "sampled tokens of a trajectory"),
        Metric("rollout/sampled_tokens/total", "tokens", "sampled tokens of the step"),
        Metric("rollout/sampled_token_ratio", "share", "sampled tokens among the tokens of the responses"),
        Metric(
            "rollout/think_repetition",
            "share",
            "4-grams of a turn's tokens that stood in the same turn before",
        ),
        Metric(
            "rollout/sampled_perplexity",
            "-",
            "exp of the mean negative log-probability of the sampled tokens, under the sampler's policy",
        ),
        Metric(
            f"rollout/staleness/{SPREAD}",
            "steps",
            "steps between the oldest policy that wrote a trajectory and the policy that it trains",
        ),
        Metric("rollout/mixed_versions", "share", "trajectories that more than one policy wrote"),
        Metric(
            "rollout/failed",
            "trajectories",
            "trajectories of the step that could not be finished; they are not trained",
        ),
        Metric("rollout/failed_share", "share", "the same as a share of the step's trajectories"),
        Metric(
            "rollout/failed/<who>",
            "trajectories",
            "the same by who failed: retriever, sampler, judge, time limit or an action",
        ),
        Metric("rollout/workers", "workers", "vLLM workers that answered the probe after the publication"),
        Metric("rollout/workers_lost", "workers", "vLLM workers lost since the start of the program"),
        Metric(
            "rollout/probe_logprob_diff_{mean,max}",
            "nats",
            "difference of the worker's and the learner's log-probabilities of a fixed text, once published",
        ),
    ),
    "advantage": (
        Metric(f"advantage/{SPREAD}", "advantage", "advantages of the sampled tokens, as trained"),
        Metric("advantage/groups/all_wrong_share", "share", "groups whose scores are all 0"),
        Metric("advantage/groups/all_right_share", "share", "groups whose scores are all the largest reward"),
        Metric(
            "advantage/groups/one_sided_share",
            "share",
            "groups whose answer turns have advantages of one sign only",
        ),
        Metric(
            "advantage/answer/positive_{before,after}",
            "advantage × tokens",
            "sum of the positive advantages over the answer turns' tokens, before and after calibration",
        ),
        Metric(
            "advantage/answer/negative_{before,after}",
            "advantage × tokens",
            "magnitude of the sum of the negative advantages there, before and after calibration",
        ),
        Metric(
            "advantage/answer/ratio_{before,after}",
            "-",
            "negative / positive: the imbalance; after calibration it is advantage.target_ratio (lambda)",
        ),
        Metric(
            "advantage/search/negative_{before,after}",
            "advantage × tokens",
            "magnitude of the sum of the negative advantages over the search turns' tokens, before and after",
        ),
        Metric(
            "advantage/search/softened_share",
            "share",
            "part of the searches with a negative advantage whose penalty was made smaller",
        ),
        Metric("advantage/correctness/mean", "share", "correctness of the searches that were judged"),
        Metric("advantage/correctness/zero_share", "share", "judged searches with correctness 0"),
        Metric(
            "advantage/correctness/to_one_third_share",
            "share",
            "judged searches with correctness in (0, 1/3]",
        ),
        Metric(
            "advantage/correctness/to_two_thirds_share",
            "share",
            "judged searches with correctness in (1/3, 2/3]",
        ),
        Metric("advantage/correctness/to_one_share", "share", "judged searches with correctness in (2/3, 1]"),
        Metric("advantage/silver/group_share", "share", "groups that have silver documents"),
        Metric("advantage/silver/size_mean", "documents", "silver documents of a group that has any"),
        Metric(
            "advantage/tokens/search_{positive,negative}",
            "tokens",
            "tokens of search turns, by sign of advantage",
        ),
        Metric(
            "advantage/tokens/answer_{positive,negative}",
            "tokens",
            "tokens of answer turns, by sign of advantage",
        ),
        Metric("advantage/skipped_trajectories", "trajectories", "without any sampled token"),
        Metric(
            "advantage/golden/<policy>/{first,last}",
            "probability",
            "of a golden answer's tokens before the first turn and before the last one; policy: current or"
            " initial",
        ),
        Metric("advantage/golden/tokens", "tokens", "computed for that by each policy"),
    ),
    "actor": (
        Metric("actor/loss", "-", "loss of the policy over all trained tokens, all terms"),
        Metric(
            "actor/pg_loss",
            "-",
            "its policy-gradient term, by loss.name",
        ),
        Metric("actor/entropy", "nats", "entropy of the policy over the computed tokens"),
        Metric("actor/ppo_kl", "nats", "mean of old minus new log-probability of the computed tokens"),
        Metric("actor/pg_clipfrac", "share", "computed tokens whose ratio is clipped"),
        Metric(
            "actor/sampler_mismatch",
            "nats",
            "difference of the learner's and the sampler's log-probabilities, mean over the computed tokens",
        ),
        Metric(
            "actor/sampler_masked",
            "share",
            "of the computed tokens, those masked by loss.importance_low and importance_high",
        ),
        Metric("actor/kl_loss", "nats", "KL divergence from the initial policy, by loss.kl_estimator"),
        Metric("actor/grad_norm", "-", "global norm of the gradient before it is scaled down"),
        Metric("actor/lr", "-", "learning rate of the step's first update"),
        Metric("actor/updates", "updates", "optimizer updates of the step"),
        Metric("actor/skipped", "share", "updates left out because their gradient was not finite"),
        Metric("actor/finite", "0 or 1", "1 if the parameters are finite after the step"),
        Metric("actor/row_fill", "share", "part of the packed rows that holds tokens"),
        Metric(
            "actor/computed_share",
            "share",
            "part of the loss's weights that belongs to samples which could change the loss",
        ),
        Metric(
            "actor/untrained_trajectories",
            "trajectories",
            "trajectories that failed or have no sampled token",
        ),
    ),
    "critic": (
        Metric("critic/loss", "-", "half the squared error of the critic's values, clipped; by critic.clip"),
        Metric("critic/clipfrac", "share", "sampled tokens whose clipped value has the larger error"),
        Metric(
            "critic/explained_variance",
            "share",
            "of the returns' variance, what the values before the step explain: 1 is all, below 0 is worse"
            " than a constant",
        ),
        Metric(f"critic/values/{SPREAD}", "score", "expected before the sampled tokens, before the step"),
        Metric(f"critic/returns/{SPREAD}", "score", "what the values should have been"),
        Metric("critic/grad_norm", "-", "global norm of the critic's gradient before it is scaled down"),
        Metric("critic/lr", "-", "learning rate of the critic's first update of the step"),
        Metric("critic/updates", "updates", "optimizer updates of the critic in the step"),
        Metric("critic/skipped", "share", "updates left out because their gradient was not finite"),
        Metric("critic/finite", "0 or 1", "1 if the critic's parameters are finite after the step"),
    ),
    "guard": (
        Metric(
            "guard/{entropy,format_valid,think_repetition,sampled_perplexity,answer_ratio,numbers}",
            "0 or 1",
            "1 if the step is beyond the guard's threshold (config section guards; numbers: not finite)",
        ),
    ),
    "time": (
        Metric("timing_s/step", "s", "the whole step"),
        Metric("timing_s/rollout", "s", "waiting for trajectories"),
        Metric("timing_s/probe", "s", "the golden answers' probabilities, if advantage.name or probes asks"),
        Metric("timing_s/values", "s", "the critic's values of the step, where there is a critic"),
        Metric("timing_s/advantage", "s", "rewards, advantages and the metrics of the trajectories"),
        Metric("timing_s/update", "s", "the learner"),
        Metric("timing_s/record", "s", "writing the step's trajectories to disk"),
        Metric("timing_s/publish", "s", "handing the policy to the sampler"),
        Metric("timing_s/evaluate", "s", "evaluation, at steps that have an evaluation"),
        Metric(f"timing_s/trajectory/{SPREAD}", "s", "one trajectory, searches and weight swaps included"),
        Metric(
            "perf/tokens_per_second",
            "tokens/s",
            "trained tokens, prompts and observations included, by step time",
        ),
        Metric(
            "perf/packing",
            "positions",
            "positions computed by the updates for each token of the trajectories: rows have empty ends and"
            " microbatches empty rows; below 1 where trajectories share what they begin with",
        ),
        Metric("perf/record_bytes", "bytes", "size of the step's file of trajectories"),
    ),
    "eval": (
        Metric(
            "eval/<data source>/<metric>/<temperature>",
            "as named",
            "evaluation every evaluate.every steps: f1, em, cover_em, format, answered, searches, tokens,"
            " failed; temperature: greedy or temperature_T",
        ),
    ),
    "cold start": (
        Metric("sft/loss", "nats", "mean negative log-probability of the trained tokens"),
        Metric(
            "sft/held_out_loss",
            "nats",
            "the same for the questions that sft.held_out keeps back, every sft.held_out_every updates",
        ),
        Metric("sft/entropy", "nats", "entropy of the policy over trained tokens"),
        Metric("sft/lr", "-", "learning rate"),
        Metric("sft/tokens", "tokens", "tokens of the update, prompts and observations included"),
    ),
}


def metrics() -> Iterator[Metric]:
    """Every metric, section by section."""
    for section in SECTIONS.values():
        yield from section


def authors_names(name: str) -> list[str]:
    """Under which other names the value of `name` is logged too; see `summary.ALIASES`."""
    found = []
    for alias, own in ALIASES.items():
        if own == name:
            found.append(alias)
        elif name.startswith(f"{own}/") and name.removeprefix(f"{own}/") in ("mean", "max", "min"):
            found.append(alias + name.removeprefix(own))
    return found


def find(name: str) -> Metric | None:
    """The entry of a logged name, one of the authors' names included; None where there is none."""
    for metric in metrics():
        for own in metric.names():
            pattern = ".+".join(re.escape(part) for part in re.split(r"<[^>]*>", own))
            if re.fullmatch(pattern, name) or name in authors_names(own):
                return metric
    return None
