"""Arms of the learner's update on the quickstart's shapes, one after the other in turns, in one process.

    python -m benchmarks.update.update_speed [--config configs/quickstart_long.yaml] [--rounds 8] [ARM …]

An arm is `ROW_LENGTHxROWS`, such as 320x16 or 384x4 (rows of that many tokens, so many a microbatch), with
`:all` to compute also the trajectories without any advantage and `:loop` to loop over the layers. The first
arm is what the others are compared with. `--part sft` times the cold start's update instead, where an arm
is `ROW_LENGTHxROWS` of the whole update.

The trajectories are demonstrations of the config's own world, in the tokens of its own tokenizer, written
into a temporary folder; a share of them (`--idle`) has no advantage. Random weights. Prints for each arm the
seconds of its first call, which compiles, the median wall-clock and CPU seconds of the others, and both as
ratios to the first arm's (above 1: faster). CPU seconds tell more on a shared machine, wall-clock seconds on
an idle one. JAX_NUM_CPU_DEVICES=2 gives each of two cores a device of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice

import jax
import numpy as np

from calibadv_jax.commands.sft import encode_demonstration
from calibadv_jax.config import Config, LearnerConfig, load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.contrib.worlds.world_demonstrations import imperfect
from calibadv_jax.learner.batching import RowShape, Sample, pack, plan, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import negative_log_likelihood, policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.learner.step import learn
from calibadv_jax.policy import transformer
from calibadv_jax.run.model import Model, build_model

Call = Callable[[], None]


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(arguments.config, [f"run.dir={folder}"])
        write_world(config.world)
        model = build_model(config, "")
    rng = np.random.default_rng(0)
    samples = list(islice(drawn(config, model, rng, arguments.idle), 4 * 80))
    make = sft_arm if arguments.part == "sft" else step_arm
    arms, first = {}, {}
    for name in arguments.arms:
        with layers(looped=name.endswith(":loop")):
            arms[name] = make(config, model, samples, name)
            first[name] = seconds(arms[name])[0]
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, call in arms.items():
            timed[name].append(seconds(call))
    report(arguments, config, model, samples, first, timed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update.update_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("arms", nargs="*", default=["320x16:all", "384x4:all", "384x4:all:loop", "384x4"])
    parser.add_argument("--config", default="configs/quickstart_long.yaml")
    parser.add_argument("--part", choices=["learn", "sft"], default="learn")
    parser.add_argument("--idle", type=float, default=0.44, help="share of trajectories without advantage")
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


def drawn(config: Config, model: Model, rng: np.random.Generator, idle: float) -> Iterator[Sample]:
    """Yield endless trajectories as a step's: one advantage each, none for a share of them."""
    for demonstration in imperfect(0, config.world):
        sample = encode_demonstration(demonstration, config, model.tokenizer, "sampled")
        advantage = 0.0 if rng.random() < idle else rng.normal()
        yield dataclasses.replace(
            sample,
            advantages=np.where(sample.mask, advantage, 0.0).astype(np.float32),
            logprobs=np.where(sample.mask, -np.log(len(model.tokenizer)), 0.0).astype(np.float32),
        )


@contextlib.contextmanager
def layers(looped: bool) -> Iterator[None]:
    """Compile within the block with a loop over the layers, as it is where they are many."""
    limit = transformer.MAX_UNROLLED_LAYERS
    transformer.MAX_UNROLLED_LAYERS = 0 if looped else limit
    try:
        yield
    finally:
        transformer.MAX_UNROLLED_LAYERS = limit


def shape(name: str) -> tuple[int, int]:
    """Return (row length, rows) of an arm."""
    pack_length, rows = name.split(":")[0].split("x")
    return int(pack_length), int(rows)


def step_arm(config: Config, model: Model, samples: list[Sample], name: str) -> Call:
    """Return a training step on the trajectories of one step: every update of it."""
    pack_length, rows = shape(name)
    per_step = config.rollout.questions_per_step * config.rollout.group_size
    chosen = samples[:per_step]
    optimizer = make_optimizer(config.learner.optimizer, make_schedule(config.learner.optimizer, 1000))
    learner = Learner(
        model.policy, optimizer, model.mesh, LearnerOptions(rows, logprob_chunk=config.policy.logprob_chunk)
    )
    holder = [learner.init(init_params(model.policy, model.mesh, 0))]
    loss = policy_gradient(dataclasses.replace(config.loss, entropy_coef=0.0), on_policy=False)
    definition = dataclasses.replace(loss.definition, every_sample=":all" in name)
    loss = dataclasses.replace(loss, definition=definition)
    settings: LearnerConfig = dataclasses.replace(config.learner, pack_length=pack_length)

    def call() -> None:
        rng = np.random.default_rng(0)
        holder[0] = learn(learner, holder[0], chosen, settings, loss, rng).state

    return call


def sft_arm(config: Config, model: Model, samples: list[Sample], name: str) -> Call:
    """Return one update of the cold start."""
    pack_length, rows = shape(name)
    count = next(n for n in range(len(samples), 0, -1) if rows_needed(samples[:n], pack_length) <= rows)
    weights = token_weights(samples[:count], "token_mean")
    batch = pack(samples[:count], pack_length, weights=weights)
    optimizer = make_optimizer(config.sft.optimizer, make_schedule(config.sft.optimizer, 1000))
    learner = Learner(model.policy, optimizer, model.mesh, LearnerOptions(rows, rows_key="sft.rows"))
    holder = [learner.init(init_params(model.policy, model.mesh, 0))]

    def call() -> None:
        holder[0], _ = learner.update(holder[0], [batch], negative_log_likelihood)

    return call


def rows_needed(samples: list[Sample], pack_length: int) -> int:
    return plan([len(sample.tokens) for sample in samples], [RowShape(pack_length, 1)]).num_rows[0]


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return (wall-clock, CPU) seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def report(
    arguments: argparse.Namespace,
    config: Config,
    model: Model,
    samples: list[Sample],
    first: dict[str, float],
    timed: dict[str, list[tuple[float, float]]],
) -> None:
    lengths = [len(sample.tokens) for sample in samples]
    out = sys.stdout.write
    out(
        f"{arguments.part}, {jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__},"
        f" {model.policy.architecture.num_parameters} parameters, {np.mean(lengths):.0f} tokens a trajectory"
        f" (at most {max(lengths)}), {config.learner.minibatch_size} trajectories an update\n"
    )
    out(f"{'arm':18}{'first s':>9}{'wall s':>9}{'cpu s':>9}{'wall ratio':>12}{'cpu ratio':>11}\n")
    medians = {
        name: [statistics.median(column) for column in zip(*values, strict=True)]
        for name, values in timed.items()
    }
    base = medians[arguments.arms[0]]
    for name, (wall, cpu) in medians.items():
        out(f"{name:18}{first[name]:9.1f}{wall:9.3f}{cpu:9.3f}{base[0] / wall:12.2f}{base[1] / cpu:11.2f}\n")


if __name__ == "__main__":
    main()
