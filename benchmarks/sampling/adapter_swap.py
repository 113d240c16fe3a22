"""Adapters into a vLLM worker: as merged weights, and alone, beside each other.

    python -m benchmarks.sampling.adapter_swap --model FOLDER [--rank 16] [--swaps 4] [--dtype bfloat16]

Publishes and swaps in random adapters of a model, all steps included, in turn as a merged policy and as
adapters that the worker adds to the base. Prints the medians, and how far the worker's log-probabilities of a
text of random tokens are from those of base and adapters as the learner applies them, in the worker's
precision and in float32. First, computed here: how far bfloat16 is from float32, applied and merged. With
--swaps 0 that is all.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.config import LoraConfig, MeshConfig, SamplerConfig
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.run.model import AdapterBase
from calibadv_jax.sampler.rollout_workers import VllmWorkerProcess
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config
from calibadv_jax.snapshots.publish import SnapshotStore, snapshot_version
from calibadv_jax.snapshots.weight_files import weights_hash

LENGTH = 256  # tokens of the text
KINDS = ("merged", "adapters")


def moved(policy: Policy, seed: int) -> Params:
    """Return adapters as after a training: the products change the weights by about a hundredth."""
    drawn = policy.split(jax.jit(policy.init)(jax.random.key(seed)))[1]
    keys = iter(jax.random.split(jax.random.key(seed + 1), 64))

    def restored(path: Any, leaf: jax.Array) -> jax.Array:
        is_second = path[-1].key == "lora_b"
        return 2e-3 * jax.random.normal(next(keys), leaf.shape) if is_second else leaf

    return jax.tree_util.tree_map_with_path(restored, drawn)


def applied(policy: Policy, params: Params, tokens: np.ndarray, dtype: Any) -> np.ndarray:
    """Return float32 [T - 1]: log-probabilities of all tokens but the first, as the learner computes them."""
    policy = Policy(policy.architecture, Numerics(compute_dtype=dtype), policy.adapters)

    @jax.jit
    def values(params: Params) -> jax.Array:
        decoder, row = policy.merge(params), jnp.asarray(tokens[None])
        hidden = decoder(row, jnp.arange(len(tokens))[None], jnp.ones_like(row))
        logprobs = jax.nn.log_softmax(decoder.logits(hidden)[0, :-1])
        return jnp.take_along_axis(logprobs, row[0, 1:, None], axis=-1)[:, 0]

    return np.asarray(values(params))


def rounding(policy: Policy, params: Params, tokens: np.ndarray) -> None:
    """Print how far bfloat16 is from base and adapters in float32, applied and merged."""
    half, full = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    exact = applied(policy, params, tokens, full)
    settings = {
        "applied, computed in bfloat16": applied(policy, params, tokens, half),
        "merged in bfloat16, computed in bfloat16": applied(
            policy, policy.fold_adapters(params, half), tokens, half
        ),
        "merged in bfloat16, computed in float32": applied(
            policy, policy.fold_adapters(params, half), tokens, full
        ),
        "merged in float32, computed in float32": applied(
            policy, policy.fold_adapters(params, full), tokens, full
        ),
        "without the adapters, in float32": applied(policy, policy.split(params)[0], tokens, full),
    }
    for name, values in settings.items():
        sys.stdout.write(f"{np.abs(values - exact).mean():.6f}  {name}\n")


async def measure(
    sampler: VllmSampler, snapshots: list[tuple[str, Path]], tokens: np.ndarray
) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Return seconds of the swaps by kind, but for the first two, which open the session; the last values."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tensors: dict[str, np.ndarray] = {}
    for kind, snapshot in snapshots:
        begun = time.monotonic()
        await sampler.load(snapshot_version(snapshot), snapshot)
        seconds[kind].append(time.monotonic() - begun)
        (tensors[kind],) = (await sampler.prompt_logprobs(tokens.tolist())).values()
    await sampler.close()
    return {kind: values[1:] for kind, values in seconds.items()}, tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="HuggingFace folder of the base")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=4, help="number of swaps of each kind; 0: no worker")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the worker")
    arguments = parser.parse_args()
    out, dtype = sys.stdout.write, jnp.dtype(arguments.dtype)
    hf_config = read_hf_config(arguments.model)
    adapters = Adapters.from_config(LoraConfig(rank=arguments.rank, base_dtype=arguments.dtype))
    assert adapters is not None
    policy = Policy(architecture_from_hf(hf_config), Numerics(), adapters)
    frozen = load_params(arguments.model, policy, make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]))
    base = AdapterBase("base", str(arguments.model.absolute()), weights_hash(arguments.model), 0, adapters)
    tokens = np.random.default_rng(0).integers(0, policy.architecture.vocab_size, LENGTH).astype(np.int32)
    rounding(policy, merge_params(frozen, moved(policy, 0)), tokens)
    if not arguments.swaps:
        return
    with tempfile.TemporaryDirectory() as name:
        store = SnapshotStore(Path(name) / "snapshots", keep=2 * arguments.swaps + 2, dtype=dtype)
        snapshots: list[tuple[str, Path]] = []
        published: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(arguments.swaps + 1):
            new = moved(policy, number)
            for kind in KINDS:
                begun = time.monotonic()
                shared = base.snapshot_metadata() if kind == "adapters" else None
                params = new if shared else policy.fold_adapters(merge_params(frozen, new), dtype)
                version = len(snapshots)
                about: dict[str, Any] = {
                    "hf_config": hf_config,
                    "tokenizer_hash": "benchmark",
                    "base": shared,
                }
                snapshots.append((kind, store.publish(version, params, **about)))
                published[kind].append(time.monotonic() - begun)
        for kind, snapshot in snapshots[:2]:
            size = sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file())
            out(f"{kind:9} {size / 1e6:8.1f} MB a snapshot\n")
        options = {"dtype": arguments.dtype, "max_model_len": 2 * LENGTH, "max_num_seqs": 8}
        with VllmWorkerProcess(arguments.model, Path(name) / "log", options) as worker:
            sampler = VllmSampler([worker.url], SamplerConfig(), StopRule(None, []), "benchmark")
            seconds, logprobs = asyncio.run(measure(sampler, snapshots, tokens))
    for kind in KINDS:
        publish = statistics.median(published[kind][1:])
        swap = statistics.median(seconds[kind])
        total = f"together {publish + swap:.2f} s"
        out(f"{kind:9} published in {publish:.2f} s, swapped in {swap:.2f} s, {total}\n")
    whole = merge_params(frozen, new)
    for precision in (dtype, jnp.dtype(jnp.float32)):
        ours = applied(policy, whole, tokens, precision)
        gaps = {kind: np.abs(values - ours).mean() for kind, values in logprobs.items()}
        summary = ", ".join(f"{kind} {gap:.5f}" for kind, gap in gaps.items())
        out(f"mean gap to base and adapters applied in {precision.name}: {summary}\n")


if __name__ == "__main__":
    main()
