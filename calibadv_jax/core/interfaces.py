"""Interfaces of the agent loop: sampler, action, judge, retriever.

`Action` is what a user subclasses to give the policy a tool of their own (docs/tools.md).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibadv_jax.core.tags import format_documents, well_formed, well_formed_json
from calibadv_jax.core.tool_calls import ToolSchema, schema_fault
from calibadv_jax.core.trajectory import Document, StopReason, Trajectory

# Brackets in the JSON of an action's body, at most: parsing deeper nesting needs a deep stack.
MOST_BRACKETS = 100
# Name of an action's only argument where its description is no name.
ONLY_ARGUMENT = "input"


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
    """An action of the policy: it writes ``<name> body </name>``, or a tool call, and reads the reply.

    The agent loop takes the body from the policy's turn, calls `parse` and `call`, neutralises the reply,
    calls `render`, and appends the result to the trajectory as an observation. An observation that is too
    long loses its end. With `rollout.protocol` "tool_calls" it takes the arguments of the call, and calls
    `parse_arguments` in place of `parse`. See examples/own_tool.py.

    Attributes:
        name: Name of the action's tag: letters, digits and underscores, a letter first.
        purpose: Completes the sentence "If I want to …", in the prompt and in the notice after an invalid
            turn.
        argument: Describes the body, in the same places.
        description: Describes the action among the tools of a chat template; empty: made of `purpose`.
        parameters: Arguments of the action as a JSON schema of the type "object", for actions with several
            arguments; `call` then gets a dictionary. None: one text, named after `argument`.
        may_be_empty: Whether a turn with an empty body is valid.
        max_length: Largest number of tokens of an observation; 0: rollout.max_observation_length.
        keeps_documents_whole: Whether the record keeps the documents in full, even if the observation was
            cut.
    """

    name: str
    purpose: str
    argument: str = "text"
    description: str = ""
    parameters: dict[str, Any] | None = None
    may_be_empty: bool = False
    max_length: int = 0
    keeps_documents_whole: bool = False

    def parse(self, body: str) -> Any:
        """Return the argument of `call`.

        Args:
            body: Text between the action's tags, stripped.

        Returns:
            Any value that `call` takes; by default the body itself, or with `parameters` the JSON object in
            it.

        Raises:
            ValueError: The body is refused; the policy reads the message, and the trajectory goes on.
        """
        if self.parameters is None:
            return body
        value = parse_object(body)
        if value is None:
            names = ", ".join(f'"{name}"' for name in self.schema().parameters.get("properties", {}))
            raise ValueError(f"write a JSON object with {names or 'the arguments'}")
        fault = schema_fault(value, self.schema())
        if fault:
            raise ValueError(fault)
        return value

    def parse_arguments(self, arguments: dict[str, Any]) -> Any:
        """Return the argument of `call`, for a tool call.

        Args:
            arguments: Arguments of the call, which fit `schema`.

        Returns:
            By default the arguments themselves if the action has `parameters`, else what `parse` returns for
            the only argument.

        Raises:
            ValueError: The arguments are refused; the policy reads the message, and the trajectory goes on.
        """
        if self.parameters is not None:
            return arguments
        return self.parse(str(arguments.get(self._only_argument, "")).strip())

    def schema(self) -> ToolSchema:
        """Return the action as a tool of a chat template; the texts are not neutralised."""
        description = self.description or f"Use this to {self.purpose}."
        if self.parameters is not None:
            return ToolSchema(self.name, description, self.parameters)
        name = self._only_argument
        parameters = {
            "type": "object",
            "properties": {name: {"type": "string", "description": self.argument}},
            "required": [] if self.may_be_empty else [name],
        }
        return ToolSchema(self.name, description, parameters)

    @property
    def _only_argument(self) -> str:
        """Name of the only argument of an action without `parameters`."""
        is_name = self.argument.isascii() and self.argument.isidentifier()
        return self.argument if is_name else ONLY_ARGUMENT

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


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text of the policy is, or None.

    Args:
        text: Any text. Deep nesting is refused; lone surrogates become U+FFFD.
    """
    if text.count("{") + text.count("[") > MOST_BRACKETS:
        return None
    try:
        value = json.loads(well_formed_json(well_formed(text).encode()).decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


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
