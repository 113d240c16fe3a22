"""Demonstrations in the tokens of the agent loop, for the protocol of a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import format_documents, parse_turn, text_after_opening
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Document
from calibadv_jax.data.demonstrations import Demonstration, MessageReader, MessageTurn
from calibadv_jax.learner.batching import Sample
from calibadv_jax.rollout.actions import AccessAction, SearchAction
from calibadv_jax.rollout.protocol import TurnProtocol
from calibadv_jax.rollout.tag_protocol import TagProtocol


@dataclass(frozen=True)
class Segment:
    """A part of a demonstration that is tokenized on its own.

    Attributes:
        token_ids: int32 [N].
        is_trained: Whether it is a turn of the policy that is trained.
    """

    token_ids: np.ndarray
    is_trained: bool


class DemonstrationEncoder(ABC):
    """Writes demonstrations in the tokens of the agent loop.

    Args:
        config: The config; its protocol, actions and prompt decide the text around the turns.
        protocol: The config's protocol.
    """

    def __init__(self, config: Config, protocol: TurnProtocol):
        self.protocol = protocol
        self.max_prompt_length = config.rollout.max_prompt_length
        self.actions = {action.name: action for action in protocol.settings.enabled_actions}

    def encode(self, demonstration: Demonstration, loss_on: str) -> Sample:
        """Return a demonstration in tokens, whether or not they fit in a row.

        Args:
            demonstration: The question and the turns.
            loss_on: "sampled": the mask is True at the tokens of trained turns. "all": at every token but the
                first.

        Returns:
            Tokens int32 [T] and mask bool [T]; advantages and log-probabilities are 0.

        Raises:
            UserError: The prompt or a turn cannot be written, or rollout.max_observation_length is too small.
        """
        prompt, opening = self.protocol.open_prompt(demonstration.question, self.max_prompt_length)
        segments = [Segment(prompt, is_trained=False), *self.segments(demonstration, opening)]
        tokens = np.concatenate([segment.token_ids for segment in segments]).astype(np.int32)
        masks = []
        for segment in segments:
            masks.append(np.full(len(segment.token_ids), segment.is_trained or loss_on == "all"))
        mask = np.concatenate(masks)
        mask[0] = False  # nothing precedes the first token
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(tokens, mask, zeros, zeros)

    def length(self, demonstration: Demonstration) -> int:
        """Return the number of tokens of a demonstration, prompt and observations included.

        Raises:
            UserError: As `encode`.
        """
        return len(self.encode(demonstration, "sampled").tokens)

    def turn_lengths(self, demonstration: Demonstration) -> list[int]:
        """Return the number of tokens that the policy samples in each trained turn.

        Raises:
            UserError: As `encode`.
        """
        _, opening = self.protocol.open_prompt(demonstration.question, self.max_prompt_length)
        segments = self.segments(demonstration, opening)
        return [len(segment.token_ids) for segment in segments if segment.is_trained]

    @abstractmethod
    def segments(self, demonstration: Demonstration, opening: str) -> Iterator[Segment]:
        """Yield the turns of a demonstration and the observations between them.

        Args:
            demonstration: The question and the turns.
            opening: What the prompt writes at the beginning of the first turn.
        """

    @property
    @abstractmethod
    def turn_neutraliser(self) -> Neutraliser:
        """What removes markup of the protocol from a text that a turn quotes."""

    @abstractmethod
    def shown_documents(self, documents: Sequence[Document]) -> str:
        """Return the observation in which the policy reads the documents of a search, perhaps cut off.

        Args:
            documents: The documents, best first.

        Raises:
            UserError: rollout.max_observation_length is too small for the text around them.
        """

    @property
    def message_reader(self) -> MessageReader | None:
        """What reads messages with tool calls; None: the protocol has none."""
        return None


class TagEncoder(DemonstrationEncoder):
    """Writes demonstrations for the protocol of tags.

    Args:
        config: The config.
        protocol: Its protocol.
    """

    def __init__(self, config: Config, protocol: TagProtocol):
        super().__init__(config, protocol)
        self.neutraliser = protocol.neutraliser
        self.observations = protocol.observations

    def segments(self, demonstration: Demonstration, opening: str) -> Iterator[Segment]:
        """Yield the turns and observations."""
        for number, turn in enumerate(demonstration.turns, 1):
            if isinstance(turn, MessageTurn):
                raise UserError(
                    f"demonstration of question {demonstration.question.id!r} has tool calls, and"
                    " rollout.protocol is tags: set it to tool_calls"
                )
            text = text_after_opening(opening if number == 1 else self.observations.opening, turn.text)
            ids = np.asarray(encode(self.protocol.settings.tokenizer, text), np.int32)
            yield Segment(ids, turn.trained)
            action = self.actions.get(parse_turn(turn.text, "eos", self.neutraliser.grammar).kind)
            goes_on = action is not None and number < len(demonstration.turns)
            if goes_on or turn.documents or turn.observation:
                body = observation_body(turn.documents, turn.observation, action, self.neutraliser)
                ids, _ = self.observations.for_action(action or SearchAction()).information(body)
                yield Segment(ids, is_trained=False)

    @property
    def turn_neutraliser(self) -> Neutraliser:
        """What removes the tags from a text."""
        return Neutraliser(self.neutraliser.grammar)

    def shown_documents(self, documents: Sequence[Document]) -> str:
        """Return the observation with the documents of a search."""
        action = self.actions[SearchAction.name]
        body = format_documents(self.neutraliser.neutralise_documents(tuple(documents)))
        _, text = self.observations.for_action(action).information(body)
        return text


def observation_body(
    documents: tuple[Document, ...], observation: str, action: Action | None, neutraliser: Neutraliser
) -> str:
    """Return the text of an observation, rendered by a built-in action: no user code runs here.

    Args:
        documents: The documents of the reply.
        observation: The text before them.
        action: The action that the reply belongs to.
        neutraliser: Removes forgeries from both.
    """
    text = neutraliser.neutralise_observation(observation)
    shown_documents = tuple(neutraliser.neutralise_documents(documents))
    renderer = SearchAction() if isinstance(action, SearchAction) else AccessAction()
    return renderer.render(Reply(shown_documents, text))
