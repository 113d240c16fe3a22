"""Demonstrations in the tokens of the agent loop, for the protocol of a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Completion, Reply
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import format_documents, text_after_opening
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Document, Question, StopReason, Trajectory, Turn
from calibadv_jax.data.demonstrations import Demonstration, DemoReply, MessageReader, MessageTurn
from calibadv_jax.learner.batching import Sample
from calibadv_jax.rollout.actions import AccessAction, SearchAction
from calibadv_jax.rollout.protocol import TurnProtocol
from calibadv_jax.rollout.tag_protocol import TagProtocol


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

    def trajectory(self, demonstration: Demonstration, question: Question | None = None) -> Trajectory:
        """Return the trajectory that the agent loop would write if a policy sampled the turns.

        Args:
            demonstration: The turns.
            question: The question whose prompt and answers count; None: the demonstration's own.

        Returns:
            An unscored trajectory with the index 0, whose log-probabilities are 0. Turns without a loss are
            context.

        Raises:
            UserError: The prompt or a turn cannot be written, or rollout.max_observation_length is too small.
        """
        question = question or demonstration.question
        prompt_ids, first_opening = self.protocol.open_prompt(question, self.max_prompt_length)
        opening = self.protocol.opening
        return Trajectory(
            question,
            prompt_ids,
            turns=list(self.turns(demonstration, first_opening)),
            opening=opening,
            first_opening=None if first_opening == opening else first_opening,
            actions=self.protocol.action_names,
            protocol=self.protocol.name,
            is_demonstration=True,
        )

    def encode(self, demonstration: Demonstration, loss_on: str) -> Sample:
        """Return a demonstration in tokens, whether or not they fit in a row.

        Args:
            demonstration: The question and the turns.
            loss_on: "sampled": the mask is True at the tokens of trained turns. "all": at every token but the
                first.

        Returns:
            Tokens int32 [T] and mask bool [T]; advantages and log-probabilities are 0.

        Raises:
            UserError: As `trajectory`.
        """
        trajectory = self.trajectory(demonstration)
        tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int32)
        if loss_on == "all":
            mask = np.ones(len(tokens), bool)
        else:
            mask = np.concatenate([np.zeros(len(trajectory.prompt_ids), bool), trajectory.trained])
        mask[0] = False  # nothing precedes the first token
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(tokens, mask, zeros, zeros)

    def length(self, demonstration: Demonstration) -> int:
        """Return the number of tokens of a demonstration, prompt and observations included.

        Raises:
            UserError: As `trajectory`.
        """
        trajectory = self.trajectory(demonstration)
        return len(trajectory.prompt_ids) + len(trajectory.response_ids)

    def turn_lengths(self, demonstration: Demonstration) -> list[int]:
        """Return the number of tokens that the policy samples in each trained turn.

        Raises:
            UserError: As `trajectory`.
        """
        turns = self.trajectory(demonstration).turns
        return [len(turn.token_ids) for turn in turns if not turn.is_context]

    @abstractmethod
    def turns(self, demonstration: Demonstration, opening: str) -> Iterator[Turn]:
        """Yield the turns of a demonstration, each with the observation after it.

        Args:
            demonstration: The question and the turns.
            opening: What the prompt writes at the beginning of the first turn.
        """

    def read_turn(self, text: str, opening: str, stop_reason: StopReason, trained: bool) -> Turn:
        """Return a turn as the protocol reads its tokens, with log-probabilities of 0.

        Args:
            text: What the policy would sample.
            opening: The environment's text before it.
            stop_reason: Why sampling would end; "eos" if the last token ends the turn.
            trained: Whether the turn has a loss.
        """
        ids = encode(self.protocol.settings.tokenizer, text)
        turn = self.protocol.read_turn(Completion(ids, [0.0] * len(ids), stop_reason, ()), opening)
        turn.is_context = not trained
        return turn

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

    def turns(self, demonstration: Demonstration, opening: str) -> Iterator[Turn]:
        """Yield the turns, each with its observation."""
        for number, demo_turn in enumerate(demonstration.turns, 1):
            if isinstance(demo_turn, MessageTurn):
                raise UserError(
                    f"demonstration of question {demonstration.question.id!r} has tool calls, and"
                    " rollout.protocol is tags: set it to tool_calls"
                )
            text = text_after_opening(opening, demo_turn.text)
            turn = self.read_turn(text, opening, "stop", demo_turn.trained)
            action = self.actions.get(turn.kind)
            goes_on = action is not None and number < len(demonstration.turns)
            if goes_on or demo_turn.documents or demo_turn.observation:
                reply = DemoReply(demo_turn.documents, demo_turn.observation)
                body, turn.documents = render_reply(reply, action, self.neutraliser)
                observations = self.observations.for_action(action or SearchAction())
                turn.observation_ids, turn.observation_text = observations.information(body)
            yield turn
            opening = self.observations.opening

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


def render_reply(
    reply: DemoReply, action: Action | None, neutraliser: Neutraliser
) -> tuple[str, tuple[Document, ...]]:
    """Return the text of a reply, rendered by a built-in action: no user code runs here.

    Args:
        reply: The documents of the reply, and the text before them.
        action: The action that the reply belongs to.
        neutraliser: Removes forgeries from both.

    Returns:
        The text; and the documents as the policy reads them.
    """
    text = neutraliser.neutralise_observation(reply.text)
    documents = tuple(neutraliser.neutralise_documents(reply.documents))
    renderer = SearchAction() if isinstance(action, SearchAction) else AccessAction()
    return renderer.render(Reply(documents, text)), documents
