"""What `learner.share_prefixes` saves, on the trajectories that a run kept.

    python -m benchmarks.update.sharing RUN [learner.minibatch_size=8 …] [--steps 1 2 3]
    python -m benchmarks.update.sharing RUN --steps 3 --model FOLDER [--rounds 3]

Of each step: tokens of the trajectories that are computed (those with an advantage), columns that hold them
when their prompts stand once, and when all that they begin with does; positions that the rows of the run's
config, or of the given keys, take for each token, plain and shared. With `--model`, a HuggingFace folder of
the run's architecture, the updates of these steps are timed too: plain and shared in turns in one process;
the first of each, which compiles, is left out. They must agree in the norm of the gradient; the status is 1
where they do not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.contrib.cli.replay import KeptPolicy, kept_config, kept_samples, score_again
from calibadv_jax.core.seeds import random_state
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import policy_learner
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.learner.optimizer import make_schedule
from calibadv_jax.learner.step import learn, mini_batches, pack_rows
from calibadv_jax.rollout_store.reader import find_step, read_step
from calibadv_jax.rollout_store.schema import kept_steps
from calibadv_jax.run.model import build_model
from calibadv_jax.snapshots.huggingface import load_params

ARMS = {"plain": False, "shared": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=int, nargs="+", help="default: all that are kept")
    parser.add_argument("--model", type=Path, help="HuggingFace folder: time the updates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of learner")
    arguments = parser.parse_args()
    steps = arguments.steps or sorted(kept_steps(arguments.run))
    names = ("step", "tokens", "prompts", "all", "ratio", "plain", "shared")
    sys.stdout.write("".join(f"{name:>9}" for name in names) + "\n")
    totals = np.zeros(5)
    steps_read = {step: read(arguments.run, step, arguments.keys) for step in steps}
    for step, (config, samples) in steps_read.items():
        counts = np.zeros(5)
        for computed in updates(config, samples):
            of_arms = [
                pack_rows(KeptPolicy(), computed, replace(config.learner, share_prefixes=shares))
                for shares in ARMS.values()
            ]
            tokens, columns = of_arms[0].tokens, of_arms[1].computed
            counts += [tokens, prompts_once(computed), columns, *(rows.positions for rows in of_arms)]
        totals += counts
        report(str(step), counts)
    report("all", totals)
    if arguments.model:
        timed(arguments, steps_read)


def prompts_once(samples: list[Sample]) -> int:
    """Count the columns of the samples if those of one prompt shared it, and nothing else."""
    prompts = {sample.tokens[: sample.prompt].tobytes(): sample.prompt or 0 for sample in samples}
    return sum(prompts.values()) + sum(len(sample.tokens) - (sample.prompt or 0) for sample in samples)


def report(name: str, counts: np.ndarray) -> None:
    tokens, prompts, columns, plain, shared = (float(count) for count in counts)
    of_tokens = tokens / max(1, columns), plain / max(1, tokens), shared / max(1, tokens)
    held = "".join(f"{count:9.0f}" for count in (tokens, prompts, columns))
    sys.stdout.write(f"{name:>9}{held}" + "".join(f"{value:9.3f}" for value in of_tokens) + "\n")


def read(run: Path, step: int, keys: list[str]) -> tuple[Config, list[Sample]]:
    """Return the run's config with some keys changed, and the step's samples."""
    path = find_step(run, step)
    kept = read_step(path)
    config = kept_config(kept, path, keys)
    groups, advantages = score_again(
        kept, config, random_state(int(kept.metadata["seed"]), step - 1, "reward")
    )
    return config, kept_samples(groups, advantages, kept)


def updates(config: Config, samples: list[Sample]) -> Iterator[list[Sample]]:
    """Return the samples that each update of a step computes: those that move its loss."""
    loss = policy_loss(config)
    for chosen in mini_batches(samples, config.learner, np.random.default_rng(0)):
        computed = [samples[index] for index in chosen if loss.has_gradient(samples[index])]
        if computed:
            yield computed


def timed(arguments: argparse.Namespace, recorded: dict[int, tuple[Config, list[Sample]]]) -> None:
    config = next(iter(recorded.values()))[0]
    rule = replace(config.learner.optimizer, lr=1e-12)
    config = replace(config, learner=replace(config.learner, optimizer=rule))
    model = build_model(config, str(arguments.model))
    learner = policy_learner(config, model.policy, model.mesh, make_schedule(rule, 1000))
    state, loss = learner.init(load_params(arguments.model, model.policy, model.mesh)), policy_loss(config)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    norms: dict[str, list[float]] = {name: [] for name in ARMS}
    for round_ in range(arguments.rounds + 1):
        for name, shares in ARMS.items():
            settings = replace(config.learner, share_prefixes=shares)
            begun = time.perf_counter()
            for _, samples in recorded.values():
                learned = learn(learner, state, samples, settings, loss, np.random.default_rng(0))
                state = learned.state
                norms[name].append(learned.metrics["actor/grad_norm"])
            if round_:
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        sys.stdout.write(f"{name}: {value:.1f} s for {len(recorded)} steps\n")
    sys.stdout.write(f"ratio {medians['plain'] / medians['shared']:.2f}\n")
    if not np.allclose(norms["plain"], norms["shared"], rtol=1e-3):
        sys.exit(f"norms of the gradient differ: {norms}")


if __name__ == "__main__":
    main()
