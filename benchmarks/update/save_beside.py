"""Time of a training step with and without a checkpoint being written beside it.

    python -m benchmarks.update.save_beside [--hidden 1024] [--layers 12] [--tokens 256] [--steps 6]

Arms, in turns, each for so many steps of one learner: no save; one that is begun with the first step and
written while the steps go on (`checkpoint.asynchronous`); one that the first step waits for. Prints medians
over the rounds: seconds that the loop stood still in the save, of a step while it was being written, of a
step after it, until the checkpoint is complete, and of all steps together.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks.sampling.rollout_loops import shape
from calibadv_jax.config import MeshConfig, OptimizerConfig
from calibadv_jax.learner.batching import Sample, pack, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots.checkpoint import CheckpointStore

ARMS = ("no save", "beside the steps", "waited for")
COLUMNS = ("in save", "step beside", "step after", "complete", "all steps")


def make_steps(hidden: int, layers: int, tokens: int) -> tuple[Callable[[], None], Callable[[], object], int]:
    """Return one step of a random policy on one row of random tokens, its state, and its parameters."""
    policy = Policy(architecture_from_hf(shape(hidden, layers)), Numerics())
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    optimizer = make_optimizer(OptimizerConfig(), make_schedule(OptimizerConfig(), 1000))
    learner = Learner(policy, optimizer, mesh, LearnerOptions(1))
    holder = [learner.init(init_params(policy, mesh, 0))]
    ids = np.random.default_rng(0).integers(11, policy.architecture.vocab_size, tokens).astype(np.int32)
    nothing = np.zeros(tokens, np.float32)
    sample = Sample(ids, nothing == 0, nothing, nothing)
    batch = pack([sample], tokens, weights=token_weights([sample], "token_mean"))

    def step() -> None:
        holder[0], _ = learner.update(holder[0], [batch], negative_log_likelihood)
        jax.block_until_ready(holder[0])

    return step, lambda: holder[0], policy.architecture.num_parameters


def arm(
    name: str, number: int, steps: int, step: Callable[[], None], state: Callable[[], object], folder: Path
) -> dict[str, float]:
    """Return seconds by column."""
    store = CheckpointStore(folder / name.replace(" ", "_"), 1, asynchronous=name == "beside the steps")
    begun = time.perf_counter()
    if name != "no save":
        store.save(number, state(), {})
    seconds = {"in save": time.perf_counter() - begun}
    beside: list[float] = []
    after: list[float] = []
    for _ in range(steps):
        started, is_beside = time.perf_counter(), store.is_writing()
        step()
        (beside if is_beside else after).append(time.perf_counter() - started)
        if is_beside and not store.is_writing():
            seconds["complete"] = time.perf_counter() - begun
    seconds["all steps"] = time.perf_counter() - begun
    store.wait()
    if name != "no save":
        seconds.setdefault(
            "complete", seconds["in save"] if name == "waited for" else time.perf_counter() - begun
        )
    store.close()
    for label, values in (("step beside", beside), ("step after", after)):
        if values:
            seconds[label] = statistics.median(values)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="number of tokens of a step's only row")
    parser.add_argument("--steps", type=int, default=6, help="number of steps of an arm in a round")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    step, state, parameters = make_steps(arguments.hidden, arguments.layers, arguments.tokens)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state()))
    step()  # compiles
    timings: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, arguments.rounds + 1):
            for name in ARMS:
                place = Path(folder)
                timings[name].append(arm(name, number, arguments.steps, step, state, place))
    out = sys.stdout.write
    size = f"{parameters / 1e6:.0f}M parameters, {held / 1e9:.2f} GB of state"
    out(f"{size}, {arguments.tokens} tokens a step\n")
    out(f"{'seconds':18}" + "".join(f"{column:>13}" for column in COLUMNS) + "\n")
    for name, rounds in timings.items():
        cells = []
        for column in COLUMNS:
            values = [values[column] for values in rounds if column in values]
            cells.append(f"{statistics.median(values):13.2f}" if values else f"{'':13}")
        out(f"{name:18}" + "".join(cells) + "\n")


if __name__ == "__main__":
    main()
