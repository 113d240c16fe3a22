"""What the agent loop needs of a sampler and of a retriever; backends are swappable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibadv_jax.core.trajectory import Document, StopReason


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled."""

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    seed: int = 0  # uint32; same seed, same context, same policy: same tokens
    stop: tuple[str, ...] = ()  # kept in the completion


@dataclass(frozen=True)
class Completion:
    """Token-out: exactly what was sampled."""

    token_ids: list[int]  # up to the token that completed a stop string, or the end-of-text token ("eos")
    logprobs: list[float]  # one per token, at the sampling temperature (greedy: at temperature 1)
    stop_reason: StopReason
    policy_versions: tuple[int, ...]


class Sampler(Protocol):
    """Token-in, token-out. `session` names a trajectory, so that a backend can reuse its KV cache."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """
        Raises:
            RequestFailed: this completion cannot be had; others may.
            UserError: none can.
        """
        ...

    def release(self, session: str) -> None:
        """The trajectory has ended; its cache may be reused."""
        ...

    async def load(self, version: int, params: dict[str, Any]) -> None:
        """Samples with these parameters from now on.

        Args:
            version: of the policy; ascending within a run.
            params: the learner's own. When this returns they may be donated.
        """
        ...

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Log-probabilities float32 [T - 1] of tokens 1 … T - 1 under every copy of the weights, by its name.

        Empty if the weights are the learner's own and there is nothing to compare.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the program's start, by their names in metrics.jsonl."""
        ...

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        ...


class Retriever(Protocol):
    """Finds documents for queries."""

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Best documents first; one list per query, in the order of the queries.

        Raises:
            QueryRefused: the service does not take one of these queries.
            RequestFailed: these queries were not answered; others may be.
            UserError: none can be.
        """
        ...

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        ...
