"""The learner beside PyTorch and transformers on the CPU: the same tokens, weights and loss, in turns.

    OMP_WAIT_POLICY=passive taskset -c 0,1 python -m benchmarks.update.beside_torch quickstart [--rounds 8]
    OMP_WAIT_POLICY=passive taskset -c 0,1 python -m benchmarks.update.beside_torch 30m [--rounds 4]

Both compute in float32 with two threads, in one process: one call of each arm a round. `quickstart` is a step
of configs/quickstart_long.yaml, `30m` a policy of 30 million parameters in rows of 1,024 tokens. Random
weights, written as a HuggingFace folder that transformers loads.

Arms of PyTorch: `padded`: micro-batches of `--micro` trajectories in the order of the step, padded on the
right to the longest one; `sorted`: the same by length, so that less is padded; `packed`: the rows that the
learner computes, with a mask of the segments. Right padding needs no mask, so that the first two get the
fastest attention that PyTorch has.

Before timing, log-probabilities, loss and norm of the gradient of every arm are compared with the learner's;
the status is 1 where they differ. Prints median wall-clock and CPU seconds and the ratios of PyTorch's to the
learner's (above 1: the learner is faster). Wall-clock ratios need an otherwise idle machine. `--idle S` gives
a share of the trajectories no advantage: the learner leaves those out of the update, PyTorch computes them.
JAX_NUM_CPU_DEVICES=2 gives the learner two devices, as the quickstart does. At `30m` both sides should keep
their memory between calls, else the kernel zeroes gigabytes at each microbatch:

    M=glibc.malloc
    export GLIBC_TUNABLES=$M.hugetlb=1:$M.mmap_max=0:$M.trim_threshold=17179869184:$M.arena_max=1
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else PyTorch's idle threads take the learner's cores

import jax
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.device import SHAPES
from benchmarks.update.update_speed import drawn, seconds
from calibadv_jax.config import Config, LearnerConfig, LossConfig, MeshConfig, OptimizerConfig, load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.learner.batching import Batch, RowShape, Sample, pack, plan, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.learner.step import learn, sample_logprobs
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.run.model import build_model
from calibadv_jax.snapshots.huggingface import save_folder

THREADS = 2
LOSS = LossConfig()
OPTIMIZER = OptimizerConfig(lr=1e-6, schedule="constant")
ARMS = ("padded", "sorted", "packed")
MIDDLE = SHAPES["30m"]


@dataclass(frozen=True)
class Setting:
    """What both sides compute."""

    hf_config: dict[str, Any]
    samples: list[Sample]
    learner: LearnerConfig
    micro: int  # trajectories of a padded micro-batch


@dataclass
class Result:
    """What an arm found in its first update."""

    logprobs: list[np.ndarray]  # float32 [T] of every sample; entry 0 means nothing
    loss: float
    grad_norm: float


Calls = tuple[Callable[[], list[np.ndarray]], Callable[[], tuple[float, float]]]  # log-probabilities, update


def main() -> None:
    arguments = parse()
    torch.set_num_threads(THREADS)
    setting = SETTINGS[arguments.setting](arguments)
    policy = Policy(architecture_from_hf(setting.hf_config), Numerics())
    mesh = make_mesh(MeshConfig(data=-1, fsdp=1))
    with tempfile.TemporaryDirectory() as folder:
        params = init_params(policy, mesh, 0)
        save_folder(params, setting.hf_config, Path(folder) / "hf", "float32", None)
        arms = {"learner": learner_calls(setting, policy, mesh, params)}
        for name in arguments.arms:
            arms[name] = torch_calls(setting, Path(folder) / "hf", name)
    results = {name: Result(logprobs(), *update()) for name, (logprobs, update) in arms.items()}
    differences = {name: difference(results["learner"], result) for name, result in results.items()}
    timed: dict[tuple[str, int], list[tuple[float, float]]] = {
        (name, part): [] for name in arms for part in (0, 1)
    }
    for _ in range(arguments.rounds):
        for name, part in timed:
            timed[name, part].append(seconds(arms[name][part]))
    report(arguments, setting, policy, differences, timed)
    if max(differences.values()) > 1e-3:
        sys.exit("the arms do not compute the same")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.update.beside_torch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("setting", choices=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--idle", type=float, default=0.0, help="share of trajectories without advantage")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro", type=int, help="number of trajectories of PyTorch's padded micro-batches")
    parser.add_argument("--rows", type=int, help="another learner.microbatch_rows")
    return parser.parse_args()


def quickstart(arguments: argparse.Namespace) -> Setting:
    """Return a step of the quickstart: demonstrations of its own world stand for the trajectories."""
    with tempfile.TemporaryDirectory() as folder:
        config: Config = load_config("configs/quickstart_long.yaml", [f"run.dir={folder}"])
        write_world(config.world)
        model = build_model(config, "")
        count = config.rollout.questions_per_step * config.rollout.group_size
        samples = list(islice(drawn(config, model, np.random.default_rng(0), arguments.idle), count))
    learner = dataclasses.replace(
        config.learner, microbatch_rows=arguments.rows or config.learner.microbatch_rows
    )
    return Setting(model.hf_config, samples, learner, arguments.micro or 16)


def middle(arguments: argparse.Namespace) -> Setting:
    """Return twelve trajectories of 150 to 1,024 tokens, half of their tokens sampled."""
    rng = np.random.default_rng(0)
    samples = []
    for length in np.clip(rng.lognormal(np.log(400), 0.6, 12), 150, 1024).astype(int):
        mask = rng.random(length) < 0.5
        mask[:32] = False
        advantage = 0.0 if rng.random() < arguments.idle else rng.normal()
        tokens = rng.integers(0, MIDDLE["vocab_size"], length).astype(np.int32)
        values = np.where(mask, advantage, 0.0).astype(np.float32)
        samples.append(Sample(tokens, mask, values, np.where(mask, -9.0, 0.0).astype(np.float32)))
    learner = LearnerConfig(pack_length=1024, microbatch_rows=arguments.rows or jax.device_count())
    return Setting(MIDDLE, samples, learner, arguments.micro or 2)


SETTINGS = {"quickstart": quickstart, "30m": middle}


def learner_calls(setting: Setting, policy: Policy, mesh: Any, params: Any) -> Calls:
    """Return the calls of the learner, as in a training step, packing included."""
    optimizer = make_optimizer(OPTIMIZER, make_schedule(OPTIMIZER, 1000))
    learner = Learner(
        policy, optimizer, mesh, LearnerOptions(setting.learner.microbatch_rows, entropy_gradient=False)
    )
    holder = [learner.init(params)]
    loss = policy_gradient(LOSS, on_policy=True)

    def logprobs() -> list[np.ndarray]:
        one_width = dataclasses.replace(setting.learner, row_widths=1)
        return sample_logprobs(learner, holder[0]["params"], setting.samples, one_width)

    def update() -> tuple[float, float]:
        rng = np.random.default_rng(0)
        learned = learn(learner, holder[0], setting.samples, setting.learner, loss, rng)
        holder[0] = learned.state
        return learned.metrics["actor/loss"], learned.metrics["actor/grad_norm"]

    return logprobs, update


@dataclass(frozen=True)
class Piece:
    """A micro-batch of PyTorch; column t describes the token that follows it, as in `Batch`."""

    inputs: dict[str, torch.Tensor]  # of the model
    targets: torch.Tensor  # int64 [B, T]
    weights: torch.Tensor  # float32 [B, T]
    advantages: torch.Tensor  # float32 [B, T]
    places: list[tuple[int, int, int, int]]  # sample, row, first column, length


def padded(setting: Setting, by_length: bool) -> Iterator[Piece]:
    """Yield micro-batches of whole trajectories, padded on the right: causal attention needs no mask."""
    samples = setting.samples
    weights = token_weights(samples, LOSS.aggregation)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].tokens) if by_length else 0)
    for start in range(0, len(order), setting.micro):
        chosen = order[start : start + setting.micro]
        width = max(len(samples[index].tokens) for index in chosen)
        tokens = np.zeros((len(chosen), width + 1), np.int64)
        shares, advantages = np.zeros((2, len(chosen), width), np.float32)
        places = []
        for row, index in enumerate(chosen):
            length = len(samples[index].tokens)
            tokens[row, :length] = samples[index].tokens
            shares[row, : length - 1] = weights[index][1:]
            advantages[row, : length - 1] = samples[index].advantages[1:]
            places.append((index, row, 0, length))
        inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
        yield Piece(
            {"input_ids": inputs}, targets, torch.from_numpy(shares), torch.from_numpy(advantages), places
        )


def packed(setting: Setting) -> Iterator[Piece]:
    """Yield the rows of the learner's own packing, as many at once as it takes."""
    batch: Batch = pack(setting.samples, setting.learner.pack_length, LOSS.aggregation)
    lengths = [len(sample.tokens) for sample in setting.samples]
    packing = plan(lengths, [RowShape(setting.learner.pack_length, 1)])
    placements, num_rows = packing.placements, packing.num_rows[0]
    rows = setting.learner.microbatch_rows
    causal = np.tril(np.ones((setting.learner.pack_length,) * 2, bool))
    for start in range(0, num_rows, rows):
        microbatch = jax.tree.map(lambda array, first=start: array[first : first + rows], batch)
        visible = causal & (microbatch.segment_ids[:, :, None] == microbatch.segment_ids[:, None, :])
        inputs = {
            "input_ids": torch.from_numpy(microbatch.tokens.astype(np.int64)),
            "position_ids": torch.from_numpy(microbatch.positions.astype(np.int64)),
            "attention_mask": torch.from_numpy(visible[:, None]),
        }
        places = [
            (index, placement.row - start, placement.start, placement.length)
            for index, placement in enumerate(placements)
            if start <= placement.row < start + rows
        ]
        yield Piece(
            inputs,
            torch.from_numpy(microbatch.targets.astype(np.int64)),
            torch.from_numpy(microbatch.weights),
            torch.from_numpy(microbatch.advantages),
            places,
        )


def torch_calls(setting: Setting, folder: Path, name: str) -> Calls:
    """Return the calls of the same step in PyTorch, making the micro-batches included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        OPTIMIZER.lr,
        (OPTIMIZER.beta1, OPTIMIZER.beta2),
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )

    def pieces() -> Iterator[Piece]:
        return packed(setting) if name == "packed" else padded(setting, by_length=name == "sorted")

    def forward(piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**piece.inputs, use_cache=False).logits
        chosen = -cross_entropy(logits.flatten(0, 1), piece.targets.flatten(), reduction="none")
        return chosen.view(piece.targets.shape), logits

    @torch.no_grad()
    def logprobs() -> list[np.ndarray]:
        values: list[np.ndarray] = [np.zeros(0)] * len(setting.samples)
        for piece in pieces():
            logprobs = forward(piece)[0].numpy()
            for index, row, start, length in piece.places:
                of_tokens = logprobs[row, start : start + length - 1]
                values[index] = np.concatenate([np.zeros(1, np.float32), of_tokens])
        return values

    def update() -> tuple[float, float]:
        total = 0.0
        for piece in pieces():
            loss = torch_loss(*forward(piece), piece)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return logprobs, update


def torch_loss(logprobs: torch.Tensor, logits: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Compute `objective.policy_gradient` on the policy's own samples, with the entropy that it reports."""
    log_ratio = torch.clamp(logprobs - logprobs.detach(), -20.0, 20.0)
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1.0 - LOSS.clip_low, 1.0 + LOSS.clip_high)
    objective = torch.minimum(ratio * piece.advantages, clipped * piece.advantages)
    with torch.no_grad():
        normaliser = torch.logsumexp(logits, -1)
        expected = torch.einsum("btv,btv->bt", torch.softmax(logits, -1), logits)
        (piece.weights * (normaliser - expected)).sum()
    return -(piece.weights * objective).sum()


def difference(expected: Result, result: Result) -> float:
    """Return the largest difference of log-probabilities, loss and relative norm of the gradient."""
    pairs = zip(expected.logprobs, result.logprobs, strict=True)
    largest = max(float(np.abs(ours - torchs).max()) for ours, torchs in pairs)
    norm = abs(result.grad_norm / expected.grad_norm - 1.0)
    return max(largest, abs(result.loss - expected.loss), norm)


def report(
    arguments: argparse.Namespace,
    setting: Setting,
    policy: Policy,
    differences: dict[str, float],
    timed: dict[tuple[str, int], list[tuple[float, float]]],
) -> None:
    lengths = [len(sample.tokens) for sample in setting.samples]
    out = sys.stdout.write
    out(
        f"{arguments.setting}: {policy.architecture.num_parameters} parameters, {len(lengths)} trajectories"
        f" of {np.mean(lengths):.0f} tokens (at most {max(lengths)}), {arguments.idle:.0%} without advantage;"
        f" {jax.device_count()} device(s), jax {jax.__version__}, torch {torch.__version__},"
        f" {setting.learner.pack_length}x{setting.learner.microbatch_rows} rows, {setting.micro} padded\n"
    )
    out(f"{'':30}{'difference':>11}{'wall s':>9}{'cpu s':>9}{'wall ratio':>12}{'cpu ratio':>11}\n")
    for part, label in enumerate(("log-probabilities", "update")):
        medians = {
            name: [statistics.median(column) for column in zip(*timed[name, part], strict=True)]
            for name in differences
        }
        base = medians["learner"]
        for name, (wall, cpu) in medians.items():
            ratios: Sequence[float] = (wall / base[0], cpu / base[1])
            out(
                f"{label:20}{name:10}{differences[name]:11.1e}{wall:9.3f}{cpu:9.3f}"
                f"{ratios[0]:12.2f}{ratios[1]:11.2f}\n"
            )


if __name__ == "__main__":
    main()
