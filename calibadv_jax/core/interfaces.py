"""Interfaces of the agent loop: sampler, action, judge, retriever.

`Action` is what a user subclasses to give the policy a tool of their own (docs/tools.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibadv_jax.core.tags import format_documents
from calibadv_jax.core.trajectory import Document, StopReason, Trajectory


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is sampled.

    Attributes:
        max_tokens: Largest number of tokens to sample.
        temperature: Sampling temperature; 0: greedy.
        top_p: Sample from the smallest set of tokens that together have this probability; 1: off.
        top_k: Sample from this many most likely tokens; 0: off.
        seed: A uint32. Equal seed, context and policy give equal tokens.
        stop: Strings that end the completion. The completion keeps the string that ended it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The tokens that a sampler sampled, exactly.

    Attributes:
        token_ids: Ids of the N sampled tokens, up to and including the token that completed a stop string, or
            the end-of-text token (stop_reason "eos").
        logprobs: Log-probability of each of the N tokens in nats, at the sampling temperature; with greedy
            sampling, at temperature 1.
        stop_reason: Why sampling ended: "stop" (a stop string), "eos", "length" (max_tokens) or "abort".
        policy_versions: Versions of the policy that sampled the tokens; several if weights were swapped
            meanwhile.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_versions: tuple[int, ...]


class Closable(Protocol):
    """Has connections to close."""

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        return


class Sampler(Closable, Protocol):
    """Takes token ids and returns token ids.

    The `session` of its methods names a trajectory, so that the sampler can reuse the trajectory's KV cache.
    """

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Sample a completion.

        Args:
            token_ids: Ids of all tokens before the completion, prompt included.
            sampling: How to sample.
            session: Name of the trajectory.

        Returns:
            The sampled token ids with the log-probability of each, why they end, and the versions of the
            policy that wrote them.

        Raises:
            RequestFailed: This request failed; the trajectory has failed.
            UserError: No request can succeed; the run ends.
        """

    def release(self, session: str) -> None:
        """Allow the KV cache of a trajectory that has ended to be reused.

        Args:
            session: Name of the trajectory.
        """

    async def load(self, version: int, published: Any) -> None:
        """Sample with other parameters from now on.

        Args:
            version: Version of the policy; it ascends within a run.
            published: What this sampler loads: the folder of a snapshot, or the parameters on devices, which
                may be donated after the return.
        """

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the log-probabilities of the tokens of a prompt, under each copy of the weights.

        Args:
            token_ids: Ids of T tokens.

        Returns:
            Name of the copy -> float32 [T - 1], the log-probabilities of tokens 1 to T - 1 in nats. Empty if
            the sampler uses the learner's own weights.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return counts since the start of the program, by their names in metrics.jsonl."""
        return {}


@dataclass(frozen=True)
class Reply:
    """Result of an action.

    Attributes:
        documents: Documents for the policy, best first; they are candidates for the silver set.
        text: Text for the policy, shown before the documents.
    """

    documents: tuple[Document, ...] = ()
    text: str = ""


class Action(ABC):
    """An action of the policy: it writes ``<name> body </name>`` and reads the reply.

    The agent loop takes the body from the policy's turn, calls `parse` and `call`, neutralises the reply,
    calls `render`, and appends the result to the trajectory as an observation. An observation that is too
    long loses its end. See examples/own_tool.py.

    Attributes:
        name: Name of the action's tag: letters, digits and underscores, a letter first.
        purpose: Completes the sentence "If I want to …", in the prompt and in the notice after an invalid
            turn.
        argument: Describes the body, in the same places.
        may_be_empty: Whether a turn with an empty body is valid.
        max_length: Largest number of tokens of an observation; 0: rollout.max_observation_length.
        keeps_documents_whole: Whether the record keeps the documents in full, even if the observation was
            cut.
    """

    name: str
    purpose: str
    argument: str = "text"
    may_be_empty: bool = False
    max_length: int = 0
    keeps_documents_whole: bool = False

    def parse(self, body: str) -> Any:
        """Return the argument of `call`.

        Args:
            body: Text between the action's tags, stripped.

        Returns:
            Any value that `call` takes; by default the body itself.

        Raises:
            ValueError: The body is refused; the policy reads the message, and the trajectory goes on.
        """
        return body

    @abstractmethod
    async def call(self, argument: Any) -> Reply:
        """Execute the action.

        Another error than those below, or a call that takes longer than `tools[].timeout`, fails the
        trajectory.

        Args:
            argument: What `parse` returned.

        Returns:
            Texts and documents for the policy. An action of your own may return a text alone, or a list of
            documents.

        Raises:
            ActionRefused: The argument is refused; the policy reads the message, and the trajectory goes on.
            QueryRefused: The retriever refuses the query; the policy reads that, and the trajectory goes on.
            RequestFailed: There is no reply; the trajectory has failed.
            UserError: No trajectory can get a reply; the run ends.
        """

    def render(self, reply: Reply) -> str:
        """Return the text of an observation, without its tags.

        Args:
            reply: Result of `call`, with its text and its documents neutralised.

        Returns:
            By default the reply's text, and then its numbered documents, best first.
        """
        parts = (reply.text, format_documents(reply.documents))
        return "\n".join(part for part in parts if part)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        return


class Judge(Closable, Protocol):
    """Scores answers with another model."""

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the metrics of a trajectory.

        Args:
            trajectory: A trajectory that has answered.

        Returns:
            Name of the metric -> value.

        Raises:
            RequestFailed: There is no verdict; the trajectory has failed.
            UserError: No trajectory can get a verdict; the run ends.
        """


class Retriever(Closable, Protocol):
    """Returns documents for queries."""

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return the documents of each query.

        Args:
            queries: Q queries.

        Returns:
            Q lists of documents, each with the best document first.

        Raises:
            QueryRefused: The service refuses the queries, and would refuse them again.
            RequestFailed: There is no reply; the trajectory has failed.
            UserError: No query can get a reply; the run ends.
        """

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """Return the page at each address.

        Args:
            addresses: A addresses of pages.

        Returns:
            A pages; None where the service has no page.

        Raises:
            QueryRefused: The service refuses the addresses, and would refuse them again.
            RequestFailed: There is no reply; the trajectory has failed.
            UserError: No address can get a reply; the run ends.
        """
