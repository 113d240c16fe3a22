"""What a protocol of turns decides: the prompt, how a turn is read, and what the environment writes after it.

`tag_protocol` is this project's tags, `tool_protocol` the tool calls of a chat template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig, RolloutConfig, ToolCallsConfig
from calibadv_jax.core.errors import ActionRefused, QueryRefused, UserError
from calibadv_jax.core.interfaces import Action, Completion
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import QUERY_REFUSED, refusal_text, well_formed
from calibadv_jax.core.tokens import decode, encode
from calibadv_jax.core.trajectory import Document, Question, Turn
from calibadv_jax.rollout.actions import SearchAction
from calibadv_jax.rollout.observation import cut_early, neutralise_reply
from calibadv_jax.rollout.prompts import lengths_above


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class Observation:
    """What the environment writes after a turn.

    Attributes:
        ids: int32 [M], its tokens.
        text: Its text.
        documents: Documents of all calls, neutralised, in the order in which the policy reads them.
        is_refused: Whether the action, or every call, was refused.
    """

    ids: np.ndarray = field(default_factory=_no_ids)
    text: str = ""
    documents: tuple[Document, ...] = ()
    is_refused: bool = False


@dataclass(frozen=True)
class ProtocolSettings:
    """Settings of a run that its protocol depends on.

    Attributes:
        tokenizer: A tokenizer of transformers.
        rollout: The section `rollout`.
        prompt: The section `prompt`.
        actions: The actions that are on; none stand for search alone.
        tool_calls: The section `tool_calls`.
        answer_from: Where the answer stands: "tag", "whole" or "box".
    """

    tokenizer: Any
    rollout: RolloutConfig
    prompt: PromptConfig
    actions: tuple[Action, ...] = ()
    tool_calls: ToolCallsConfig = ToolCallsConfig()
    answer_from: str = "tag"

    @property
    def enabled_actions(self) -> tuple[Action, ...]:
        """The actions that are on, at least one."""
        return self.actions or (SearchAction(),)


class TurnProtocol(ABC):
    """A protocol of turns, with the settings of a run.

    Attributes:
        settings: The settings.
        opening: The environment's text before every turn but the first.
        stop_strings: Strings that end a turn.
        end_of_turn_ids: Tokens that end a turn, besides the policy's end-of-text tokens.
        neutraliser: Removes forgeries from untrusted text.
    """

    settings: ProtocolSettings
    opening: str = ""
    stop_strings: tuple[str, ...] = ()
    end_of_turn_ids: frozenset[int] = frozenset()
    neutraliser: Neutraliser

    @property
    def name(self) -> str:
        """Name of the protocol, as in rollout.protocol."""
        return self.settings.rollout.protocol

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the actions that are on."""
        return tuple(action.name for action in self.settings.enabled_actions)

    @abstractmethod
    def write_prompt(self, question: Question) -> tuple[str, str]:
        """Return a question's prompt as text, and the end of it that begins the first turn.

        Args:
            question: the question.

        Returns:
            The prompt; and "<think>" or what else begins the first turn, or "".

        Raises:
            UserError: if the question's row has no prompt, or the chat template fails or is missing.
        """

    def open_prompt(self, question: Question, max_length: int) -> tuple[np.ndarray, str]:
        """Return a question's prompt as tokens, and the end of it that begins the first turn.

        Args:
            question: the question.
            max_length: tokens that the prompt may have.

        Returns:
            Token ids, int32 [P]; and the text that begins the first turn.

        Raises:
            UserError: if the prompt is too long, or as `write_prompt`.
        """
        text, opening = self.write_prompt(question)
        ids = encode(self.settings.tokenizer, text)
        if len(ids) > max_length:
            raise UserError(
                f"question {question.id!r}: its prompt has {len(ids)} tokens, but rollout.max_prompt_length"
                f" is {max_length}: raise it, or drop the question"
            )
        return np.asarray(ids, np.int32), opening

    def prompt_lengths(self, questions: Sequence[Question], max_length: int) -> dict[int, int]:
        """Return the lengths of the prompts that are too long.

        Args:
            questions: the questions.
            max_length: tokens that a prompt may have.

        Returns:
            Index of a question -> tokens of its prompt, for the prompts of more than `max_length` tokens.

        Raises:
            UserError: as `write_prompt`.
        """
        return lengths_above(questions, self.write_prompt, self.settings.tokenizer, max_length)

    @abstractmethod
    def read_turn(self, completion: Completion, opening: str) -> Turn:
        """Return the turn that a completion is.

        Args:
            completion: the sampled tokens.
            opening: the environment's text before the turn.
        """

    @abstractmethod
    async def execute(self, turn: Turn, actions: Mapping[str, Action]) -> Observation:
        """Execute the action or the calls of a turn.

        Args:
            turn: a turn with an action.
            actions: the actions that are on, by name, with their services.

        Returns:
            The observation; long texts are cut.

        Raises:
            RequestFailed: if there is no reply; the trajectory has failed.
            UserError: if no trajectory can get a reply.
        """

    @abstractmethod
    def notice(self, turn: Turn) -> Observation:
        """Return the notice after an invalid turn.

        Args:
            turn: an invalid turn.
        """

    @abstractmethod
    def reply_texts(self, turn: Turn) -> list[str]:
        """Return the texts in a turn's observation, without what the protocol writes around them.

        Args:
            turn: a turn with its observation.

        Returns:
            The reply to the action, or to each call in order.
        """

    @abstractmethod
    def begin_answer(self, opening: str) -> tuple[str, str]:
        """Return what the policy writes before the answer of its last turn.

        Args:
            opening: the environment's text before the turn.

        Returns:
            The beginning of the turn, with an empty thought where the protocol has one; and the space between
            it and the answer.
        """

    @property
    @abstractmethod
    def control_ids(self) -> frozenset[int]:
        """Tokens beyond the tokenizer's plain vocabulary that the policy itself has to write."""

    def describe(self) -> list[str]:
        """Return what the start of a run says about the protocol, in sentences, one a line."""
        return []

    def diagnose(self) -> list[str]:
        """Return what `calibadv doctor` says about the protocol, in sentences, one a line."""
        return self.describe()

    def thinking_limit(self, turns: Sequence[Turn]) -> int:
        """Return the largest number of tokens of the next turn's thought; 0: no limit of its own.

        Args:
            turns: the turns so far.
        """
        return 0

    def is_thinking(self, text: str, opening: str) -> bool:
        """Return whether a turn that was cut has not closed its thought.

        Args:
            text: the policy's text so far.
            opening: the environment's text before the turn.
        """
        return False

    def close_thought(self) -> Observation:
        """Return what closes a thought that has reached its limit."""
        return Observation()


def added_ids(tokenizer: Any, text: str) -> frozenset[int]:
    """Return the added tokens in a text, such as control tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        text: the text.
    """
    return frozenset(encode(tokenizer, text)).intersection(tokenizer.get_added_vocab().values())


def read_text(completion: Completion, tokenizer: Any) -> str:
    """Return the text of a completion without the token that ended it.

    Args:
        completion: the sampled tokens.
        tokenizer: a tokenizer of transformers.
    """
    text_ids = completion.token_ids
    # A policy may have several end-of-text tokens; the sampler says "eos" for each of them.
    if completion.stop_reason == "eos":
        text_ids = text_ids[:-1]
    return decode(tokenizer, text_ids)


@dataclass(frozen=True)
class CallResult:
    """What an action brought.

    Attributes:
        text: Neutralised text for the policy.
        documents: Neutralised documents.
        is_refused: Whether the action was refused; the text then says so.
    """

    text: str
    documents: tuple[Document, ...] = ()
    is_refused: bool = False


async def call_action(
    action: Action,
    parse: Callable[[], Any],
    settings: ProtocolSettings,
    neutraliser: Neutraliser,
    max_length: int,
) -> CallResult:
    """Call an action.

    Args:
        action: the action, with its services.
        parse: returns the argument of `Action.call`; a ValueError refuses it.
        settings: settings of the run.
        neutraliser: removes forgeries from the reply.
        max_length: tokens that may be shown; each text keeps at least as many, see `cut_early`.

    Returns:
        The neutralised reply, or a refusal.

    Raises:
        RequestFailed: if there is no reply; the trajectory has failed.
        UserError: if no trajectory can get a reply.
    """
    try:
        reply = await action.call(_parsed(parse))
    except QueryRefused:
        return CallResult(QUERY_REFUSED, is_refused=True)
    except ActionRefused as error:
        reason = cut_early(
            well_formed(str(error)), settings.tokenizer, settings.rollout.max_observation_length
        )
        return CallResult(refusal_text(action.name, neutraliser.neutralise(reason)), is_refused=True)
    reply = neutralise_reply(reply, action, settings.tokenizer, neutraliser, max_length)
    return CallResult(action.render(reply), reply.documents)


def _parsed(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError as error:
        raise ActionRefused(str(error)) from error
