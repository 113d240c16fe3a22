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
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group
from calibadv_jax.learner.batching import Batch, Sample
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.objective import LossFunction, policy_loss
from calibadv_jax.learner.step import learn, make_sample
from calibadv_jax.metrics.console import Console, number, table
from calibadv_jax.metrics.summary import trajectory_metrics
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.reader import KeptStep, find_step, read_step
from calibadv_jax.rollout_store.schema import kept_steps

SHOWN = ("reward/", "group/", "advantage/", "actor/pg_loss", "actor/computed_share")
ROUNDING = 1e-9  # relative; other machines add the same float64 numbers in another order


@dataclasses.dataclass(frozen=True)
class Replay:
    groups: list[Group]
    advantages: AdvantageResult
    metrics: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of a run with log.rollouts")
    parser.add_argument("--step", type=int, help="number of the kept step; default: the newest kept step")
    text = "settings of reward, advantage, loss or learner to replay the step with"
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Print the comparison; exit status 1 if the run's own settings give other advantages than were kept."""
    folder: Path = arguments.run_dir
    step = max(kept_steps(folder), default=0) if arguments.step is None else arguments.step
    path = find_step(folder, step)
    kept = read_step(path)
    same = replay(kept, kept_config(kept, path))
    columns = {"replayed": same.metrics}
    if arguments.overrides:
        changed = replay(kept, kept_config(kept, path, arguments.overrides))
        columns["changed"] = changed.metrics
    say = Console().say
    num_trajectories = sum(len(group.attempts) for group in kept.groups)
    say(f"step {step} of {folder}: {len(kept.groups)} groups, {num_trajectories} trajectories")
    rows = comparison_rows(columns)
    say(table(rows, ["metric", *columns, "differs"]))
    equal, total = equal_turns(kept.credits, same.advantages.credits)
    exact, _ = equal_turns(kept.credits, same.advantages.credits, rounding=0)
    bits = "bit for bit" if exact == equal else f"{exact} of them bit for bit, the others within {ROUNDING:g}"
    say(f"replayed: {equal} of {total} turns have the advantage that was kept, {bits}")
    if arguments.overrides:
        say(f"{sum('≠' in row for row in rows)} of {len(rows)} metrics differ (≠)")
        unchanged, _ = equal_turns(kept.credits, changed.advantages.credits)
        say(f"{' '.join(arguments.overrides)}: {total - unchanged} of {total} turns get another advantage")
    if equal < total:
        raise SystemExit(1)


def kept_config(kept: KeptStep, path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config under which the step of a file was made, with some keys changed."""
    return parse_config(kept.metadata["config"], str(path), overrides)


def replay(kept: KeptStep, config: Config) -> Replay:
    """Compute reward, advantages and loss of a kept step under a config; the step stays unchanged."""
    begun, seed = kept.step - 1, int(kept.metadata["seed"])
    groups, advantages = score_again(kept, config, random_state(seed, begun, "reward"))
    samples, rng = kept_samples(groups, advantages, kept), random_state(seed, begun, "minibatches")
    learned = learn(KeptPolicy(), {"params": {}}, samples, config.learner, policy_loss(config), rng)
    metrics = trajectory_metrics(groups, begun) | advantages.metrics | learned.metrics
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
    for group, values, learner in zip(groups, advantages.advantages, kept.learner_logprobs, strict=True):
        for trajectory, advantage, logprobs in zip(group.trajectories, values, learner, strict=True):
            sample = make_sample(trajectory, advantage)
            old = sample.logprobs
            if logprobs is not None:
                old = np.concatenate([np.zeros(len(trajectory.prompt_ids), np.float32), logprobs])
            samples.append(dataclasses.replace(sample, old_logprobs=old))
    return samples


class KeptPolicy:
    """Takes the learner's place, and computes the loss with the log-probabilities of the samples."""

    def update(
        self, state: State, batches: Sequence[Batch], loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]:
        sums: dict[str, float] = {}
        for batch in batches:
            logprobs = jnp.asarray(batch.old_logprobs)
            entropies = jnp.zeros_like(logprobs)  # not kept: the loss is shown without its bonus
            total, metrics = loss(logprobs, entropies, batch, None)
            for name, value in (metrics | {"actor/loss": total}).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return state, sums

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        return np.asarray(batch.old_logprobs)

    def position_cost(self, length: int) -> float:
        return 1.0


def equal_turns(
    kept: Sequence[GroupCredit], replayed: Sequence[GroupCredit], rounding: float = ROUNDING
) -> tuple[int, int]:
    """Return the numbers of turns with the same advantage, but for `rounding`, and of all turns."""
    before = np.concatenate([np.zeros(0), *(values for credit in kept for values in credit.turns)])
    after = np.concatenate([np.zeros(0), *(values for credit in replayed for values in credit.turns)])
    return int(np.isclose(after, before, rounding, rounding).sum()), len(before)


def comparison_rows(columns: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each metric of SHOWN: name, values, "≠" where they differ beyond rounding."""
    rows = []
    for name in sorted({name for column in columns.values() for name in column if name.startswith(SHOWN)}):
        values = [column.get(name) for column in columns.values()]
        before, after = values[0], values[-1]
        differs = False
        if before is not None and after is not None:
            differs = not np.isclose(after, before, ROUNDING, ROUNDING, equal_nan=True)
        cells = ["-" if value is None else number(value) for value in values]
        rows.append([name, *cells, "≠" if differs else ""])
    return rows
