"""Real vLLM workers over tiny random policies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_policy import LLAMA3, tiny

from calibadv_jax.config import SamplerConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler.rollout_workers import VllmWorkerProcess
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore

MAX_LENGTH, EOS = 3072, 1
SHAPE = {
    "vocab_size": 398,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "eos_token_id": EOS,
}
QWEN2 = SHAPE | {"model_type": "qwen2", "tie_word_embeddings": True}
LLAMA = SHAPE | {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@dataclass
class Rig:
    """A policy, its published versions, and workers that serve it."""

    folder: Path
    hf_config: dict[str, Any]
    dtype: str = "float32"
    num_workers: int = 1
    tokenizer_hash: str = "a tokenizer"
    tokenizer: Any = field(default_factory=build_word_tokenizer)

    def __post_init__(self) -> None:
        self.policy = tiny(self.hf_config, compute_dtype=jnp.dtype(self.dtype))
        self.store = SnapshotStore(self.folder / "snapshots", keep=20, dtype=jnp.dtype(self.dtype))
        self.tokenizer.save_pretrained(self.folder / "tokenizer")
        self.model_folder = self.folder / "model"
        save_folder(self.params(0), self.hf_config, self.model_folder, self.dtype, self.folder / "tokenizer")
        options = {"flavour": "cpu", "dtype": self.dtype, "max_num_seqs": 64, "max_model_len": MAX_LENGTH}
        logs = [self.folder / f"worker{number}.log" for number in range(self.num_workers)]
        self.workers = [
            VllmWorkerProcess(self.model_folder, log, options, start_timeout=600.0) for log in logs
        ]

    def params(self, seed: int) -> Any:
        """Random parameters, large enough that logits lie well apart."""
        made = jax.jit(self.policy.init)(jax.random.key(seed))
        keys = iter(jax.random.split(jax.random.key(seed + 1000), 64))
        return jax.tree.map(lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), made)

    def publish(self, version: int, params: Any) -> Path:
        names = {"hf_config": self.hf_config, "tokenizer_hash": self.tokenizer_hash}
        return self.store.publish(version, params, **names)

    async def load(self, sampler: VllmSampler, version: int) -> Any:
        """Publish random parameters as a version, load it, and return them."""
        params = self.params(version)
        await sampler.load(version, self.publish(version, params))
        return params

    def sampler(self) -> VllmSampler:
        """Return a sampler over the workers, which another sampler may use already."""
        urls = [worker.url for worker in self.workers]
        stops = StopRule(self.tokenizer, EOS)
        return VllmSampler(urls, SamplerConfig(), stops, self.tokenizer_hash)

    def run(self, coroutine_of: Any) -> Any:
        """Run ``coroutine_of(sampler)``, for five minutes at most, and close the sampler."""

        async def run() -> Any:
            sampler = self.sampler()
            try:
                return await asyncio.wait_for(coroutine_of(sampler), 300)
            finally:
                await sampler.close()

        return asyncio.run(run())


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    """The rig with its workers, which start side by side and end with the block."""
    with ExitStack() as stack:
        for worker in rig.workers:
            stack.callback(worker.stop)
            worker.start()
        for worker in rig.workers:
            worker.wait()
        yield rig


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, end-of-text and padding apart."""
    return np.random.default_rng(seed).integers(11, 398, (count, length)).tolist()


def gap_to_greedy(folder: Path, prompt: list[int], tokens: list[int], dtype: str) -> float:
    """Return how far the logits of a continuation lie below the best ones, by transformers; 0 if greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits[range(len(tokens)), tokens]
    return float((logits.max(-1).values - chosen).max())
