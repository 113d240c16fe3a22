"""What the agent loop needs of a sampler, a retriever, an action and a judge; backends are swappable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibadv_jax.core.tags import numbered
from calibadv_jax.core.trajectory import Document, StopReason, Trajectory


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

    async def load(self, version: int, published: Any) -> None:
        """Samples with these parameters from now on.

        Args:
            version: of the policy; ascending within a run.
            published: the parameters on devices, or the folder of their snapshot, as the sampler takes them.
                When this returns those on devices may be donated.
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


@dataclass(frozen=True)
class Reply:
    """What an action brings."""

    documents: tuple[Document, ...] = ()  # what counts for silver documents
    text: str = ""  # shown before them


class Action(ABC):
    """What a policy can do in a turn: it writes ``<name> body </name>`` and reads the reply.

    Whatever the reply says is neutralised before `render` sees it, and loses its end where it is too long.
    """

    name: str  # its tag: letters, digits and underscores
    purpose: str  # completes "If I want to …", in the prompt and in the notice after an invalid turn
    argument: str = "text"  # what stands between the tags, in the same places
    may_be_empty: bool = False  # else a turn with an empty body is invalid
    max_length: int = 0  # tokens of an observation; 0: rollout.max_observation_length
    keeps_documents_whole: bool = False  # in the record, though less of them is shown

    def parse(self, body: str) -> Any:
        """The argument of `call`.

        Raises:
            ValueError: the action does not take this body; the policy reads why, and goes on.
        """
        return body

    @abstractmethod
    async def call(self, argument: Any) -> Reply:
        """
        Raises:
            ActionRefused, QueryRefused: it does not take this argument; the policy reads so, and goes on.
            RequestFailed: there is no reply: the trajectory has failed.
            UserError: there can be none for any trajectory.
        """

    def render(self, reply: Reply) -> str:
        """What the policy reads between the tags of an observation: the text, then documents, best first."""
        return "\n".join(part for part in (reply.text, numbered(reply.documents)) if part)

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        return


class Judge(Protocol):
    """Scores answers by asking somebody."""

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Metrics of a trajectory that has answered.

        Raises:
            RequestFailed: there is no verdict: the trajectory has failed.
            UserError: there can be none for any trajectory.
        """
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

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """The page at each address, None where there is none, in their order.

        Raises:
            As `search`.
        """
        ...

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        ...
