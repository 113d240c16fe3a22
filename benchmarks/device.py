"""Update, log-probabilities and sampler on the present device.

    python -m benchmarks.device --shape tiny                 # CPU: seconds
    python -m benchmarks.device --shape qwen2.5-0.5b --peak_tflops 989   # H100/H200, bfloat16

Needs JAX, flax, optax and NumPy only. Random weights and tokens. Prints a table and, with --json FILE,
writes the figures. Model FLOPs utilisation counts 3 forward passes a trained token (no recomputation).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import LossConfig, MeshConfig, OptimizerConfig, PolicyConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.learner.batching import Batch, Sample, pack
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.learner.objective import policy_gradient
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.policy.architecture import Architecture, architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stop_rule import StopRule

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "30m": {  # 31 million parameters
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-3b": QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}


class PlainTokenizer:
    """As much of a tokenizer as the sampler asks for."""

    def get_vocab(self) -> dict[str, int]:
        return {"": 0}

    def decode(self, ids: list[int], **_: bool) -> str:
        return ""


NEVER_STOPS = StopRule(PlainTokenizer(), [])


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    compile_s: float
    median_s: float
    tokens_per_s: float
    mfu: float | None


def main() -> None:
    arguments = parse()
    config = PolicyConfig(
        compute_dtype="float32" if arguments.shape == "tiny" else "bfloat16",
        remat=arguments.remat,
        attention=arguments.attention,
    )
    architecture = architecture_from_hf(SHAPES[arguments.shape])
    policy = Policy(architecture, Numerics.from_config(config))
    rng = np.random.default_rng(0)
    batch = random_batch(rng, architecture, arguments)
    results = [
        *learner_results(policy, config, batch, arguments),
        sampler_result(policy, rng, arguments),
    ]
    report(results, policy, arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--rows", type=int, default=16, help="packed rows of the update")
    parser.add_argument("--microbatch", type=int, default=16, help="rows of one forward/backward pass")
    parser.add_argument("--length", type=int, default=320, help="tokens of a row")
    parser.add_argument("--slots", type=int, default=80, help="number of rows of the sampler")
    parser.add_argument("--prompt", type=int, default=96, help="prompt tokens of the sampler run")
    parser.add_argument("--new", type=int, default=64, help="tokens decoded in every row")
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="full")
    parser.add_argument("--attention", choices=["auto", "xla", "triton", "cudnn"], default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak_tflops", type=float, help="dense peak of the device, for utilisation")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def random_batch(
    rng: np.random.Generator, architecture: Architecture, arguments: argparse.Namespace
) -> Batch:
    """Return two trajectories a row, half of their tokens sampled."""
    half = arguments.length // 2
    samples = []
    for _ in range(2 * arguments.rows):
        mask = rng.random(half) < 0.5
        mask[0] = False
        samples.append(
            Sample(
                rng.integers(0, architecture.vocab_size, half).astype(np.int32),
                mask,
                rng.normal(size=half).astype(np.float32),
                -np.ones(half, np.float32),
            )
        )
    return pack(samples, arguments.length)


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return seconds of the first call (it compiles) and the median of the others."""
    seconds = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds[0], statistics.median(seconds[1:])


def learner_results(
    policy: Policy, config: PolicyConfig, batch: Batch, arguments: argparse.Namespace
) -> list[Result]:
    mesh = make_mesh(MeshConfig())
    optimizer = make_optimizer(OptimizerConfig(lr=1e-6), make_schedule(OptimizerConfig(), 100))
    learner = Learner(
        policy, optimizer, mesh, LearnerOptions(arguments.microbatch, logprob_chunk=config.logprob_chunk)
    )
    params = init_params(policy, mesh, 0)
    tokens = batch.tokens.size
    flops = policy.architecture.flops_per_token(arguments.length / 4) * tokens
    first, median = timed(lambda: learner.logprobs(params, batch), arguments.repeats)
    results = [
        Result("log-probabilities", first, median, tokens / median, utilisation(flops, median, arguments))
    ]
    holder = [learner.init(params)]
    loss = policy_gradient(LossConfig(), on_policy=True)

    def update() -> None:
        holder[0], _ = learner.update(holder[0], [batch], loss)

    first, median = timed(update, arguments.repeats)
    results.append(
        Result("update", first, median, tokens / median, utilisation(3 * flops, median, arguments))
    )
    return results


def sampler_result(policy: Policy, rng: np.random.Generator, arguments: argparse.Namespace) -> Result:
    mesh = make_mesh(MeshConfig())
    params = init_params(policy, mesh, 0)
    params = jax.tree.map(lambda p: p.astype(policy.numerics.compute_dtype), params)
    length = arguments.prompt + arguments.new + 1
    config = SamplerConfig(slots=arguments.slots, decode_chunk=arguments.new, prefill_chunk=arguments.prompt)
    sampler = JaxSampler(policy, NEVER_STOPS, config, mesh, length)
    asyncio.run(sampler.load(0, params))
    vocabulary = policy.architecture.vocab_size
    prompts = rng.integers(1, vocabulary, (arguments.slots, arguments.prompt)).tolist()
    num_tokens = [0]

    async def all_rows() -> None:
        sampling = SamplingParams(arguments.new, 1.0, seed=1)
        names = [str(number) for number in range(arguments.slots)]
        finished = await asyncio.gather(
            *(sampler.generate(p, sampling, n) for p, n in zip(prompts, names, strict=True))
        )
        for name in names:
            sampler.release(name)
        num_tokens[0] = sum(len(completion.token_ids) for completion in finished)

    first, median = timed(lambda: asyncio.run(all_rows()), arguments.repeats)
    forward = policy.architecture.flops_per_token(length / 2)
    flops = forward * (num_tokens[0] + arguments.slots * arguments.prompt)
    return Result(
        "sampler (prefill + decode)",
        first,
        median,
        num_tokens[0] / median,
        utilisation(flops, median, arguments),
    )


def utilisation(flops: float, seconds: float, arguments: argparse.Namespace) -> float | None:
    if arguments.peak_tflops is None:
        return None
    return flops / seconds / (arguments.peak_tflops * 1e12 * jax.device_count())


def report(results: list[Result], policy: Policy, arguments: argparse.Namespace) -> None:
    device = jax.devices()[0]
    header = {
        "device": f"{jax.device_count()} x {device.device_kind}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "shape": arguments.shape,
        "parameters": policy.architecture.num_parameters,
        "rows": arguments.rows,
        "microbatch": arguments.microbatch,
        "length": arguments.length,
        "attention": policy.numerics.kernel,
        "remat": policy.numerics.remat,
        "slots": arguments.slots,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }
    out = sys.stdout.write
    out(" ".join(f"{name}={value}" for name, value in header.items()) + "\n")
    out(f"{'':28}{'compile s':>10}{'median s':>10}{'tokens/s':>12}{'MFU':>8}\n")
    for r in results:
        mfu = "" if r.mfu is None else f"{100 * r.mfu:.1f}%"
        out(f"{r.name:28}{r.compile_s:10.1f}{r.median_s:10.3f}{r.tokens_per_s:12.0f}{mfu:>8}\n")
    if arguments.json:
        rows = [vars(result) for result in results]
        arguments.json.write_text(json.dumps(header | {"results": rows}, indent=2))


if __name__ == "__main__":
    main()
