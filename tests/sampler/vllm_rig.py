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
from tiny_policy import LLAMA3

from calibadv_jax.config import SamplerConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.stopping import StopRule
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.sampler.vllm_worker import VllmWorkerProcess
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore

MAX_LENGTH = 3072
SHAPE = {
    "vocab_size": 398,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama3-tied": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama3-untied": {"model_type": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": False},
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@dataclass
class Rig:
    """A policy, its published versions, and workers that serve it."""

    folder: Path
    hf_config: dict[str, Any]
    dtype: str = "float32"
    num_workers: int = 1
    workers: list[VllmWorkerProcess] = field(default_factory=list)
    tokenizer_hash: str = "a tokenizer"
    tokenizer: Any = field(default_factory=build_word_tokenizer)

    def __post_init__(self) -> None:
        self.policy = Policy(
            architecture_from_hf(self.hf_config), Numerics(compute_dtype=jnp.dtype(self.dtype))
        )
        self.store = SnapshotStore(self.folder / "snapshots", keep=20, dtype=jnp.dtype(self.dtype))
        self.tokenizer.save_pretrained(self.folder / "tokenizer")
        save_folder(self.params(0), self.hf_config, self.model_folder, self.dtype, self.folder / "tokenizer")

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    @property
    def urls(self) -> list[str]:
        return [worker.url for worker in self.workers]

    def params(self, seed: int) -> Any:
        """Random parameters, large enough that logits lie well apart."""
        made = jax.jit(self.policy.init)(jax.random.key(seed))
        keys = iter(jax.random.split(jax.random.key(seed + 1000), 64))
        return jax.tree.map(lambda leaf: 0.3 * jax.random.normal(next(keys), leaf.shape, leaf.dtype), made)

    def publish(self, version: int, params: Any) -> Path:
        return self.store.publish(
            version, params, hf_config=self.hf_config, tokenizer_hash=self.tokenizer_hash
        )

    def start(self) -> None:
        """Begins to start the workers; `wait` waits for them."""
        for number in range(self.num_workers):
            worker = self.worker(number)
            worker.start()
            self.workers.append(worker)

    def wait(self) -> None:
        for worker in self.workers:
            worker.wait()

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()

    def worker(self, number: int) -> VllmWorkerProcess:
        options = {"flavour": "cpu", "dtype": self.dtype, "max_num_seqs": 64, "max_model_len": MAX_LENGTH}
        log = self.folder / f"worker{number}.log"
        return VllmWorkerProcess(self.model_folder, log, options, start_timeout=600.0)

    def sampler(self, urls: list[str] | None = None, **config: Any) -> VllmSampler:
        stops = StopRule(self.tokenizer, self.hf_config["eos_token_id"])
        return VllmSampler(urls or self.urls, SamplerConfig(**config), stops, self.tokenizer_hash)

    def run(self, coroutine_of: Any, urls: list[str] | None = None, **config: Any) -> Any:
        """Runs ``coroutine_of(sampler)``, for five minutes at most, and closes the sampler."""

        async def run() -> Any:
            sampler = self.sampler(urls, **config)
            try:
                return await asyncio.wait_for(coroutine_of(sampler), 300)
            finally:
                await sampler.close()

        return asyncio.run(run())


@contextmanager
def running(*rigs: Rig) -> Iterator[None]:
    """Their workers, which start side by side and end with the block."""
    with ExitStack() as stack:
        for rig in rigs:
            stack.callback(rig.stop)
            rig.start()
        for rig in rigs:
            rig.wait()
        yield


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, end-of-text and padding apart."""
    return np.random.default_rng(seed).integers(11, 398, (count, length)).tolist()


def gap_to_greedy(folder: Path, prompt: list[int], tokens: list[int], dtype: str) -> float:
    """How far below the best logit transformers sees each token of a continuation, at most; 0: greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return float((logits.max(-1).values - logits[range(len(tokens)), tokens]).max())
