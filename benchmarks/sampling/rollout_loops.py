"""Trajectories a second of the continuous agent loop against a lock-step loop, on the same vLLM worker.

    python -m benchmarks.sampling.rollout_loops [--trajectories 96] [--turns 4] [--rounds 3] [--flavour cpu]

Lock step (as in Search-R1): every trajectory waits until all have written their turn and got their
documents. Continuous: one coroutine a trajectory. Stream: the same without an end of the batch, as with
max_staleness of 1 or more; the next trajectory begins where one has ended, through all rounds. All write
turns of the same lengths, which are heavy-tailed (log-normal), after prompts of their own, so that none
finds another's prefixes cached; documents take `--search-ms`, or log-normal times around it
(`--search-sigma`). The first two loops alternate. The policy has random weights and no end-of-text token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.config import SamplerConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.interfaces import Sampler, SamplingParams
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.rollout_workers import VllmWorkerProcess
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore, snapshot_version

DOCUMENT_TOKENS = 60
MAX_LENGTH = 4096

Turns = list[list[int]]  # per trajectory: tokens of each of its turns


def shape(hidden: int, layers: int) -> dict[str, Any]:
    """Return the HuggingFace config of the policy."""
    return {
        "model_type": "qwen3",
        "vocab_size": 398,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
    }


def draw_turns(trajectories: int, turns: int, median: float, sigma: float, seed: int) -> Turns:
    """Draw heavy-tailed turn lengths; a trajectory has between one turn and `turns`."""
    rng = np.random.default_rng(seed)
    longest = min(40 * median, (MAX_LENGTH - 40) / turns - DOCUMENT_TOKENS)
    lengths = np.minimum(np.exp(rng.normal(np.log(median), sigma, (trajectories, turns))), longest)
    counts = rng.integers(1, turns + 1, trajectories)
    return [
        np.maximum(1, row[:count]).astype(int).tolist() for row, count in zip(lengths, counts, strict=True)
    ]


@dataclass(frozen=True)
class Work:
    """Trajectories to write.

    Attributes:
        prompts: tokens of each.
        documents: tokens of each that follow each of its turns.
        search_seconds: float [trajectories, most turns], what the documents of a turn take.
        stop: strings at which turns end; one that no token can write costs as those of the protocol do.
    """

    prompts: list[list[int]]
    turns: Turns
    documents: list[list[list[int]]]
    search_seconds: np.ndarray
    stop: tuple[str, ...] = ()


def random_work(turns: Turns, search_seconds: np.ndarray, seed: int) -> Work:
    """Draw prompts and documents of random words, the same number of them everywhere."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(11, 398, (len(turns), 40)).tolist()
    documents = rng.integers(11, 398, (len(turns), max(map(len, turns)), DOCUMENT_TOKENS)).tolist()
    return Work(prompts, turns, documents, search_seconds)


class Loops:
    """Both loops over one sampler, for the same work."""

    def __init__(self, sampler: Sampler, work: Work):
        self.sampler, self.work = sampler, work

    async def turn(self, number: int, index: int, context: list[int]) -> list[int]:
        sampling = SamplingParams(
            max_tokens=self.work.turns[number][index], seed=number * 100 + index, stop=self.work.stop
        )
        completion = await self.sampler.generate(context, sampling, str(number))
        return context + completion.token_ids

    async def search(self, number: int, index: int, context: list[int]) -> list[int]:
        await asyncio.sleep(float(self.work.search_seconds[number, index]))
        return context + self.work.documents[number][index]

    async def continuous(self, at_once: int) -> None:
        free = asyncio.Semaphore(at_once)

        async def run_trajectory(number: int) -> None:
            async with free:
                context = self.work.prompts[number]
                for index in range(len(self.work.turns[number])):
                    context = await self.turn(number, index, context)
                    context = await self.search(number, index, context)
                self.sampler.release(str(number))

        await asyncio.gather(*(run_trajectory(number) for number in range(len(self.work.turns))))

    async def lock_step(self) -> None:
        contexts = dict(enumerate(self.work.prompts))
        turns = self.work.turns
        for index in range(max(map(len, turns))):
            live = [number for number in contexts if index < len(turns[number])]
            written = await asyncio.gather(*(self.turn(number, index, contexts[number]) for number in live))
            contexts |= dict(zip(live, written, strict=True))
            documents = await asyncio.gather(
                *(self.search(number, index, contexts[number]) for number in live)
            )
            contexts |= dict(zip(live, documents, strict=True))


async def measure(url: str, snapshot: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    sampler = VllmSampler([url], SamplerConfig(), StopRule(build_word_tokenizer(), []), "benchmark")
    await sampler.load(snapshot_version(snapshot), snapshot)
    seconds: dict[str, list[float]] = {"continuous": [], "lock step": [], "stream": []}
    all_turns: Turns = []
    all_searches = []
    for number in range(arguments.rounds + 1):  # the first one warms up
        turns = draw_turns(arguments.trajectories, arguments.turns, arguments.median, arguments.sigma, number)
        spread = np.random.default_rng(number).normal(
            0.0, arguments.search_sigma, (len(turns), arguments.turns)
        )
        searches = arguments.search_ms / 1000 * np.exp(spread)
        first, second = (Loops(sampler, random_work(turns, searches, 2 * number + n)) for n in (0, 1))
        both: list[tuple[str, Callable[[], Coroutine[None, None, None]]]] = [
            ("continuous", partial(first.continuous, len(turns))),
            ("lock step", second.lock_step),
        ]
        order = both if number % 2 else both[::-1]
        for name, loop in order:
            begun = time.monotonic()
            await loop()
            if number:
                seconds[name].append(time.monotonic() - begun)
        if number:
            all_turns += turns
            all_searches.append(searches)
    stream = Loops(sampler, random_work(all_turns, np.concatenate(all_searches), 2 * arguments.rounds + 2))
    begun = time.monotonic()
    await stream.continuous(arguments.trajectories)
    seconds["stream"].append((time.monotonic() - begun) / arguments.rounds)
    await sampler.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=96)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--median", type=float, default=20.0, help="median number of tokens of a turn")
    parser.add_argument("--sigma", type=float, default=1.2, help="sigma of the log-normal turn length")
    parser.add_argument("--search-ms", type=float, default=50.0)
    parser.add_argument(
        "--search-sigma",
        type=float,
        default=0.0,
        help="sigma of the log-normal search time; 0: all searches take equally long",
    )
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the policy; a multiple of 64")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--flavour", default="cpu")
    arguments = parser.parse_args()
    hf_config = shape(arguments.hidden, arguments.layers)
    policy = Policy(architecture_from_hf(hf_config), Numerics(compute_dtype=jnp.float32))
    params = jax.jit(policy.init)(jax.random.key(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = build_word_tokenizer()
        tokenizer.eos_token = None  # turns have exactly the lengths that were drawn
        tokenizer.save_pretrained(folder / "tokenizer")
        model = save_folder(params, hf_config, folder / "model", "float32", folder / "tokenizer")
        store = SnapshotStore(folder / "snapshots", keep=1, dtype=jnp.float32)
        snapshot = store.publish(0, params, hf_config=hf_config, tokenizer_hash="benchmark")
        options = {"flavour": arguments.flavour, "dtype": "float32"}
        options |= {"max_model_len": MAX_LENGTH, "max_num_seqs": arguments.slots}
        with VllmWorkerProcess(model, folder / "log", options) as worker:
            seconds = asyncio.run(measure(worker.url, snapshot, arguments))
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    lines = []
    for label, median in medians.items():
        rate = arguments.trajectories / median
        lines.append(f"{label:>12}  {median:6.2f} s  {rate:6.1f} trajectories/s")
    for label in ("continuous", "stream"):
        lines.append(f"lock step / {label} {medians['lock step'] / medians[label]:.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
