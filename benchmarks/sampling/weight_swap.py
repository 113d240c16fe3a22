"""Time of a weight swap in a vLLM worker against a raw copy of the same bytes.

    python -m benchmarks.sampling.weight_swap [--hidden 1536] [--layers 24] [--swaps 5] [--flavour cpu]

Publishes random policies in bfloat16 and swaps them in one after the other, all steps included: pause,
read, check every hash, load, resume. The raw copy is `shutil.copytree` of the snapshot. Rounds alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.sampling.rollout_loops import shape
from calibadv_jax.config import SamplerConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.rollout_workers import VllmWorkerProcess
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore, snapshot_version


async def measure(url: str, snapshots: list[Path], copy_to: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {"swap": [], "raw copy": []}
    sampler = VllmSampler([url], SamplerConfig(), StopRule(build_word_tokenizer(), []), "benchmark")
    for number, snapshot in enumerate(snapshots):
        begun = time.monotonic()
        await sampler.load(snapshot_version(snapshot), snapshot)
        swapped = time.monotonic()
        shutil.copytree(snapshot, copy_to)
        copied = time.monotonic()
        shutil.rmtree(copy_to)
        if number:  # the first one also opens the session
            seconds["swap"].append(swapped - begun)
            seconds["raw copy"].append(copied - swapped)
    await sampler.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--flavour", default="cpu")
    arguments = parser.parse_args()
    hf_config = shape(arguments.hidden, arguments.layers)
    numerics = Numerics(compute_dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    policy = Policy(architecture_from_hf(hf_config), numerics)
    make = jax.jit(policy.init)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_word_tokenizer().save_pretrained(folder / "tokenizer")
        params = make(jax.random.key(0))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        model = save_folder(params, hf_config, folder / "model", "bfloat16", folder / "tokenizer")
        store = SnapshotStore(folder / "snapshots", keep=arguments.swaps + 1, dtype=jnp.bfloat16)
        snapshots, published = [], []
        for version in range(arguments.swaps + 1):
            params = make(jax.random.key(version))
            jax.block_until_ready(params)
            begun = time.monotonic()
            snapshots.append(store.publish(version, params, hf_config=hf_config, tokenizer_hash="benchmark"))
            published.append(time.monotonic() - begun)
        del params
        options = {"flavour": arguments.flavour, "max_model_len": 1024}
        with VllmWorkerProcess(model, folder / "log", options) as worker:
            seconds = asyncio.run(measure(worker.url, snapshots, folder / "copy"))
    lines = [f"{size / 1e9:.2f} GB of parameters; publishing took {statistics.median(published):.2f} s"]
    for label, values in seconds.items():
        lines.append(
            f"{label:>8}  {statistics.median(values):.2f} s  {[round(value, 2) for value in values]}"
        )
    ratio = statistics.median(seconds["swap"]) / statistics.median(seconds["raw copy"])
    sys.stdout.write("\n".join([*lines, f"ratio of medians {ratio:.2f}"]) + "\n")


if __name__ == "__main__":
    main()
