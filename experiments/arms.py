"""The arms of experiments/evidence.md: what each changes in the config, and the order of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from calibadv_jax.core.registry import ESTIMATORS, LOSSES

ROOT = Path(__file__).resolve().parents[1]
# What a method changes. Every key that any of them sets is set by all, so that a config of either advantage
# can be the base.
_PLAIN = {
    "advantage.name": "grpo",
    "advantage.soft_penalty": "true",
    "advantage.rebalance": "true",
    "advantage.target_ratio": "1.0",
    "advantage.normalize_std": "true",
    "loss.name": "vanilla",
    "loss.aggregation": "token_mean",
    "loss.balance_ratio": "1.0",
    "loss.clip_low": "0.2",
    "loss.clip_high": "0.2",
    "loss.kl_coef": "0.0",
    "critic.optimizer.lr": "1e-05",
}
_CALIBADV = {"advantage.name": "calibadv"}
LAMBDAS = ("0.5", "0.75", "1.5", "2")  # besides 1, which is the method calibadv
_WIDTHS = {  # of losses whose clip is another one than PPO's: their papers'
    "gspo": {"loss.clip_low": "0.0003", "loss.clip_high": "0.0004"},
    "gmpo": {"loss.clip_low": "0.4", "loss.clip_high": "0.4"},
    "dppo_kl": {"loss.clip_low": "0.05", "loss.clip_high": "0.05"},
    "balance": {"loss.balance_ratio": "1.75"},  # at 1 nothing moves
}
METHODS: dict[str, dict[str, str]] = {
    "grpo": {},
    "soft": {**_CALIBADV, "advantage.rebalance": "false"},
    "rebalance": {**_CALIBADV, "advantage.soft_penalty": "false"},
    "calibadv": _CALIBADV,
    **{f"calibadv-lambda{ratio}": {**_CALIBADV, "advantage.target_ratio": ratio} for ratio in LAMBDAS},
    "grpo-cliphigh": {"loss.clip_high": "0.28"},  # DAPO's
    "grpo-kl0.001": {"loss.kl_coef": "0.001"},  # Search-R1's
    "drgrpo": {"advantage.normalize_std": "false"},
    **{name: {"advantage.name": name} for name in ESTIMATORS if name not in ("grpo", "dr_grpo")},
    "gae": {"advantage.name": "gae", "critic.optimizer.lr": "1e-3"},  # the policy's
    **{
        f"loss-{name}": {
            "loss.name": name,
            **({"loss.aggregation": "sequence_mean"} if LOSSES[name].is_sequence_mean else {}),
            **_WIDTHS.get(name, {}),
        }
        for name in LOSSES
        if name != "vanilla"
    },
}
FOUR = ("grpo", "calibadv", "soft", "rebalance")
RIVALS = (
    *("grpo", "calibadv", "calibadv-lambda2", "gigpo", "mt_grpo", "stepsearch", "igpo", "a2tgpo", "tips"),
)
EACH = (
    "grpo",
    "calibadv",
    "drgrpo",
    *(name for name in METHODS if name in {*ESTIMATORS} - {"grpo"} or "loss-" in name),
)
REMEDIES = ("grpo-cliphigh", "grpo-kl0.001", "drgrpo")
UPDATES: dict[str, dict[str, str]] = {"": {}, "-1update": {"learner.minibatch_size": "0"}}  # five, and one
NEAR, OTHERS = ("1.9e-3", "2.2e-3"), ("3e-3", "1.5e-3", "1e-3")  # learning rates at the frontier, and others
PARTS = ("all", "frontier", "halves", "lambda", "remedies", "short", "rivals", "each")


@dataclass(frozen=True)
class Defaults:
    """What a command line may leave out."""

    config: Path
    seeds: str
    lr: str  # of the parts that have one
    steps: int
    workers: int  # runs at a time


LONG = Defaults(ROOT / "configs/evidence.yaml", "3 4 5 6 7", NEAR[0], 60, 1)
SHORT = Defaults(ROOT / "configs/rumours.yaml", "9 10", "1e-3", 20, 2)
OF_PART = {
    "short": SHORT,
    "rivals": Defaults(SHORT.config, "9 10 11 12 13", "1e-3", 40, 1),
    "each": Defaults(SHORT.config, "9", "1e-3", 40, 1),
}
SHORT_METHODS = ("calibadv-lambda2", "grpo")  # what differs most there, the one that takes longer first


@dataclass(frozen=True)
class Arm:
    """One setting, to be run with several seeds."""

    method: str  # of METHODS
    lr: str  # as it is written in the name and on the command line
    updates: str = ""  # of UPDATES
    is_short: bool = False

    @property
    def name(self) -> str:
        """Name its folder: ``grpo-lr1.9e-3``, ``calibadv-lambda0.5-1update-lr3e-3``, ``short-…``."""
        return f"{'short-' if self.is_short else ''}{self.method}{self.updates}-lr{self.lr}"

    def overrides(self) -> list[str]:
        """Return ``key.path=value`` of everything in which arms differ."""
        values = _PLAIN | METHODS[self.method] | UPDATES[self.updates] | {"learner.optimizer.lr": self.lr}
        return [f"{key}={value}" for key, value in values.items()]


@dataclass(frozen=True)
class Job:
    """One training."""

    arm: Arm
    seed: int
    cold_seed: int  # whose cold start and world it begins with
    steps: int

    @property
    def name(self) -> str:
        is_own = self.arm.is_short or self.seed == self.cold_seed
        return f"{self.arm.name}/seed-{self.seed}{'' if is_own else f'-from-{self.cold_seed}'}"


def parse_name(name: str) -> Arm | None:
    """Return the arm whose folder has this name; None for another folder."""
    rest, _, lr = name.removeprefix("short-").rpartition("-lr")
    updates = next((update for update in UPDATES if update and rest.endswith(update)), "")
    method = rest.removesuffix(updates)
    return Arm(method, lr, updates, name.startswith("short-")) if method in METHODS and lr else None


def plan(part: str, seeds: Sequence[int], lr: str = LONG.lr, steps: int = LONG.steps) -> list[Job]:
    """Return the trainings of a part, the most telling first, since a session may end in between.

    Every part goes seed by seed: after each seed, all arms have been compared once more from one cold start.
    That is the seed's own, but that of the first seed in the parts short, rivals and each.

    Args:
        part: of PARTS.
        lr: learning rate of all parts but all and frontier.
    """
    shared = {
        "short": [Arm(method, lr, is_short=True) for method in SHORT_METHODS],
        "rivals": [Arm(method, lr) for method in RIVALS],
        "each": [Arm(method, lr) for method in EACH],
    }
    if part in shared:
        return [Job(arm, seed, seeds[0], steps) for seed in seeds for arm in shared[part]]
    near = [Arm(method, rate) for rate, method in product(NEAR, FOUR)]
    halves = [Arm(method, lr) for method in FOUR]
    lambdas = [Arm(f"calibadv-lambda{ratio}", lr) for ratio in LAMBDAS]
    remedies = [Arm(method, lr) for method in REMEDIES]
    others = [Arm(method, rate) for rate, method in product(OTHERS, FOUR)]
    single = [Arm(method, rate, "-1update") for rate, method in product((*NEAR, *OTHERS), FOUR)]
    blocks = {
        "all": [near, lambdas, remedies, others, single],
        "frontier": [near, others, single],
        "halves": [halves],
        "lambda": [lambdas],
        "remedies": [remedies],
    }[part]
    return [Job(arm, seed, seed, steps) for block in blocks for seed in seeds for arm in block]
