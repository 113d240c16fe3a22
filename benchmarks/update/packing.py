"""Positions that an update computes for each token, and their cost, by the widths that rows may have.

    python -m benchmarks.update.packing

256 trajectories a mini-batch for a policy of Qwen2.5-3B's shape: rows of 16,384 tokens, 8 a microbatch,
Splash attention. 45 or 80 for the quickstart's: rows of 384, 4 a microbatch, attention in plain XLA. Lengths
are log-normal, given by median and sigma, or uniform. The cost is floating-point operations by
`Architecture.flops_per_token`, relative to rows of one width; "bound" is what the tokens alone would cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import optax

from benchmarks.device import SHAPES
from calibadv_jax.config import MeshConfig
from calibadv_jax.learner.batching import plan, row_shapes
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.attention import Kernel
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy

Draw = Callable[[np.random.Generator], np.ndarray]
MOST = 5  # widths
ROUNDS = 10


def lognormal(count: int, median: int, sigma: float, shortest: int, longest: int) -> Draw:
    return lambda rng: np.clip(rng.lognormal(np.log(median), sigma, count), shortest, longest)


LARGE: tuple[str, Kernel, int, int] = ("qwen2.5-3b", "splash", 16384, 8)
SMALL: tuple[str, Kernel, int, int] = ("tiny", "xla", 384, 4)
CASES: dict[str, tuple[tuple[str, Kernel, int, int], Draw]] = {
    "256, median 2,500, sigma 0.5": (LARGE, lognormal(256, 2500, 0.5, 1000, 16384)),
    "256, median 4,000, sigma 0.6": (LARGE, lognormal(256, 4000, 0.6, 1000, 16384)),
    "256, median 6,000, sigma 0.5": (LARGE, lognormal(256, 6000, 0.5, 1000, 16384)),
    "256, median 9,000, sigma 0.3": (LARGE, lognormal(256, 9000, 0.3, 1000, 16384)),
    "256, uniform 1,000 to 16,384": (LARGE, lambda rng: rng.uniform(1000, 16385, 256)),
    "quickstart, 80": (SMALL, lognormal(80, 150, 0.35, 40, 320)),
    "quickstart, 45": (SMALL, lognormal(45, 150, 0.35, 40, 320)),
}


def main() -> None:
    out = sys.stdout.write
    counts = range(1, MOST + 1)
    out(f"{'trajectories':32}{'positions a token':>{8 * MOST}}{'relative cost':>{8 * MOST}}{'bound':>8}\n")
    out(f"{'widths':32}" + 2 * "".join(f"{count:8}" for count in counts) + "\n")
    for name, (setting, draw) in CASES.items():
        rng = np.random.default_rng(0)
        figures = np.mean([measured(setting, draw(rng).astype(int)) for _ in range(ROUNDS)], axis=0)
        out(f"{name:32}" + "".join(f"{value:8.3f}" for value in figures) + "\n")


def measured(setting: tuple[str, Kernel, int, int], lengths: np.ndarray) -> list[float]:
    """Return positions a token and relative costs by the number of widths, and the bound."""
    shape, kernel, pack_length, rows = setting
    policy = Policy(architecture_from_hf(SHAPES[shape]), Numerics(kernel=kernel))
    learner = Learner(policy, optax.sgd(1.0), make_mesh(MeshConfig(data=-1, fsdp=1)), LearnerOptions(rows))
    plans = [
        plan(lengths.tolist(), row_shapes(pack_length, rows, count, learner.position_cost))
        for count in range(1, MOST + 1)
    ]
    tokens = float(lengths.sum())
    bound = float(np.sum(lengths * [policy.architecture.flops_per_token(n / 2) for n in lengths]))
    return [
        *(sum(plan.positions) / tokens for plan in plans),
        *(plan.cost / plans[0].cost for plan in plans),
        bound / plans[0].cost,
    ]


if __name__ == "__main__":
    main()
