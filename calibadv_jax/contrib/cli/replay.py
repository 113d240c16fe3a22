"""Replays a kept step: ``calibadv replay RUN [--step N] [key.path=value …]``.

With the settings of the run the scores and advantages must equal the kept ones, on the machine of the run bit
for bit. With others a table compares the results. The policy is not run: log-probabilities are those of the
record, so the loss is that of the policy before the step's first update.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.advantages.estimators import AdvantageResult, compute_advantages
from calibadv_jax.config import Config, parse_config
from calibadv_jax.config.trust import Trust, add_flag
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group
from calibadv_jax.learner.batching import Batch, Sample
from calibadv_jax.learner.distillation import guided_samples
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.objective import LossFunction, policy_loss
from calibadv_jax.learner.step import learn, make_sample
from calibadv_jax.metrics.console import Console, number, table
from calibadv_jax.metrics.summary import trajectory_metrics
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.reader import KeptStep, find_step, read_step
from calibadv_jax.rollout_store.schema import kept_steps

# Metrics of the table of `comparison_rows`, by the beginning of their names.
SHOWN = ("reward/", "group/", "advantage/", "actor/pg_loss", "actor/computed_share")
# Relative and absolute difference between float64 values that count as equal: other machines add the same
# numbers in another order.
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a kept step gives when it is computed again."""

    groups: list[Group]  # with rewards
    advantages: AdvantageResult
    metrics: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of a run with log.rollouts")
    add_flag(parser)
    parser.add_argument("--step", type=int, help="number of the kept step; default: the newest kept step")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="settings of reward, advantage, loss or learner to replay the step with",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison of a kept step with the step computed again.

    Raises:
        UserError: the step was not kept, its file is damaged, or a key or value is refused.
        SystemExit: with status 1 if the run's own settings give other advantages than were kept.
    """
    folder: Path = arguments.run_dir
    step = arguments.step
    if step is None:
        step = max(kept_steps(folder), default=0)
    path = find_step(folder, step)
    kept = read_step(path)
    trust = Trust("replay", arguments.trust_run)
    replayed = replay(kept, kept_config(kept, path, trust=trust))
    columns = {"replayed": replayed.metrics}
    if arguments.overrides:
        changed = replay(kept, kept_config(kept, path, arguments.overrides, trust))
        columns["changed"] = changed.metrics

    console = Console()
    num_trajectories = sum(len(group.attempts) for group in kept.groups)
    console.say(f"step {step} of {folder}: {len(kept.groups)} groups, {num_trajectories} trajectories")
    rows = comparison_rows(columns)
    console.say(table(rows, ["metric", *columns, "differs"]))
    num_equal, num_turns = equal_turns(kept.credits, replayed.advantages.credits)
    num_exact, _ = equal_turns(kept.credits, replayed.advantages.credits, rounding=0)
    precision = "bit for bit"
    if num_exact != num_equal:
        precision = f"{num_exact} of them bit for bit, the others within {ROUNDING:g}"
    console.say(f"replayed: {num_equal} of {num_turns} turns have the advantage that was kept, {precision}")
    if arguments.overrides:
        num_different = sum("≠" in row for row in rows)
        console.say(f"{num_different} of {len(rows)} metrics differ (≠)")
        num_unchanged, _ = equal_turns(kept.credits, changed.advantages.credits)
        overrides = " ".join(arguments.overrides)
        num_changed = num_turns - num_unchanged
        console.say(f"{overrides}: {num_changed} of {num_turns} turns get another advantage")
    if num_equal < num_turns:
        raise SystemExit(1)


def kept_config(
    kept: KeptStep, path: Path, overrides: Sequence[str] = (), trust: Trust | None = None
) -> Config:
    """Return the config under which the step of a file was made, with some keys changed.

    Args:
        kept: the step.
        path: its file.
        overrides: "key.path=value" each.
        trust: as for `parse_config`; None: nothing that docs/security.md lists for replay.

    Raises:
        UserError: as `parse_config`.
    """
    return parse_config(kept.metadata["config"], str(path), overrides, trust or Trust("replay"))


def replay(kept: KeptStep, config: Config) -> Replay:
    """Compute reward, advantages and loss of a kept step under a config; the step stays unchanged."""
    num_completed = kept.step - 1  # steps completed before this one
    seed = int(kept.metadata["seed"])
    groups, advantages = score_again(kept, config, random_state(seed, num_completed, "reward"))
    samples = kept_samples(groups, advantages, kept)
    if config.teacher.is_on:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        coef = config.teacher.coef_at(num_completed)
        samples = guided_samples(samples, trajectories, config.teacher, coef)
    state: State = {"params": {}}
    minibatch_rng = random_state(seed, num_completed, "minibatches")
    learned = learn(KeptPolicy(), state, samples, config.learner, policy_loss(config), minibatch_rng)
    metrics = trajectory_metrics(groups, num_completed)
    metrics |= advantages.metrics
    metrics |= learned.metrics
    return Replay(groups, advantages, metrics)


def score_again(
    kept: KeptStep, config: Config, rng: np.random.Generator
) -> tuple[list[Group], AdvantageResult]:
    """Return a kept step's groups with rewards under a config, and their advantages; reward.shuffle draws."""
    groups = score_groups(kept.groups, config.reward, rng)
    return groups, compute_advantages(groups, config.advantage)


def kept_samples(groups: Sequence[Group], advantages: AdvantageResult, kept: KeptStep) -> list[Sample]:
    """Return the samples of the step, with the learner's log-probabilities if they were kept."""
    samples = []
    by_group = zip(groups, advantages.advantages, kept.learner_logprobs, strict=True)
    for group, group_advantages, group_logprobs in by_group:
        by_trajectory = zip(group.trajectories, group_advantages, group_logprobs, strict=True)
        for trajectory, advantage, logprobs in by_trajectory:
            sample = make_sample(trajectory, advantage)
            old_logprobs = sample.logprobs
            if logprobs is not None:
                prompt_logprobs = np.zeros(len(trajectory.prompt_ids), np.float32)
                old_logprobs = np.concatenate([prompt_logprobs, logprobs])
            samples.append(dataclasses.replace(sample, old_logprobs=old_logprobs))
    return samples


class KeptPolicy:
    """Takes the learner's place, and computes the loss with the log-probabilities of the samples."""

    def update(
        self, state: State, batches: Sequence[Batch], loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]:
        """Return the state unchanged, and the sums of the loss and its metrics over the batches."""
        sums: dict[str, float] = {}
        for batch in batches:
            logprobs = jnp.asarray(batch.old_logprobs)
            entropies = jnp.zeros_like(logprobs)  # not kept: the loss is shown without its bonus
            total, metrics = loss(logprobs, entropies, batch, None)
            metrics = metrics | {"actor/loss": total}
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return state, sums

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Return the old log-probabilities of the batch, float32 [B, T]."""
        return np.asarray(batch.old_logprobs)

    def position_cost(self, length: int) -> float:
        """Return the same cost for all lengths: no policy runs."""
        return 1.0


def equal_turns(
    kept: Sequence[GroupCredit], replayed: Sequence[GroupCredit], rounding: float = ROUNDING
) -> tuple[int, int]:
    """Return the number of turns whose advantage is equal within `rounding`, and of all turns."""
    before = _turn_advantages(kept)
    after = _turn_advantages(replayed)
    num_equal = int(np.isclose(after, before, rounding, rounding).sum())
    return num_equal, len(before)


def _turn_advantages(credits: Sequence[GroupCredit]) -> np.ndarray:
    """Return the advantage of every turn of every trajectory, float64 [number of turns]."""
    advantages = [np.zeros(0)]
    for credit in credits:
        advantages += credit.turns
    return np.concatenate(advantages)


def comparison_rows(columns: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each metric of SHOWN: name, values, "≠" where they differ beyond rounding."""
    names: set[str] = set()
    for column in columns.values():
        names.update(name for name in column if name.startswith(SHOWN))
    rows = []
    for name in sorted(names):
        values = [column.get(name) for column in columns.values()]
        before = values[0]
        after = values[-1]
        differs = False
        if before is not None and after is not None:
            differs = not np.isclose(after, before, ROUNDING, ROUNDING, equal_nan=True)
        cells = ["-" if value is None else number(value) for value in values]
        rows.append([name, *cells, "≠" if differs else ""])
    return rows
