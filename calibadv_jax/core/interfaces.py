"""Interfaces of the agent loop: sampler, action, judge, retriever."""

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
    """Token-out: exactly the sampled tokens."""

    token_ids: list[int]  # up to the token that completed a stop string, or the end-of-text token ("eos")
    logprobs: list[float]  # of each token, at the sampling temperature (greedy: at temperature 1)
    stop_reason: StopReason
    policy_versions: tuple[int, ...]


class Closable(Protocol):
    async def close(self) -> None:
        """Close the connections of the running event loop."""
        return


class Sampler(Closable, Protocol):
    """Token-in, token-out. `session` names a trajectory, so that a backend can reuse its KV cache."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Sample a completion; RequestFailed: this request failed; UserError: no request can succeed."""

    def release(self, session: str) -> None:
        """Allow the cache of an ended trajectory to be reused."""

    async def load(self, version: int, published: Any) -> None:
        """Sample with these parameters from now on; `version` of the policy ascends within a run.

        `published`, as the sampler takes it: the folder of a snapshot, or the parameters on devices, which
        may be donated after the return.
        """

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Return log-probabilities float32 [T - 1] of tokens 1 … T - 1, by the name of each copy of weights.

        Empty if the weights are the learner's own.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return counts since the program's start, by their names in metrics.jsonl."""
        return {}


@dataclass(frozen=True)
class Reply:
    """Result of an action."""

    documents: tuple[Document, ...] = ()  # candidates for the silver set
    text: str = ""  # shown before them


class Action(ABC):
    """An action of the policy: it writes ``<name> body </name>`` and reads the reply.

    The reply is neutralised before `render` receives it, and loses its end where it is too long.
    """

    name: str  # its tag: letters, digits and underscores
    purpose: str  # completes "If I want to …", in the prompt and in the notice after an invalid turn
    argument: str = "text"  # describes the body, in the same places
    may_be_empty: bool = False  # else a turn with an empty body is invalid
    max_length: int = 0  # tokens of an observation; 0: rollout.max_observation_length
    keeps_documents_whole: bool = False  # in the record, though less of them is shown

    def parse(self, body: str) -> Any:
        """Return the argument of `call`; a ValueError refuses this body, and the policy reads why."""
        return body

    @abstractmethod
    async def call(self, argument: Any) -> Reply:
        """Execute the action.

        Raises ActionRefused or QueryRefused where it refuses this argument: the policy reads so, and goes on;
        RequestFailed without a reply: the trajectory has failed; UserError if no trajectory can have one.
        """

    def render(self, reply: Reply) -> str:
        """Return the text between an observation's tags: the reply's text, then documents, best first."""
        return "\n".join(part for part in (reply.text, numbered(reply.documents)) if part)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        return


class Judge(Closable, Protocol):
    """Scores answers with another model."""

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Return metrics of a trajectory that has answered; errors as those of `Action.call`."""


class Retriever(Closable, Protocol):
    """Returns documents for queries; errors as those of `Action.call`."""

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return the documents of each query, best first."""

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """Return the page at each address; None where there is none."""
