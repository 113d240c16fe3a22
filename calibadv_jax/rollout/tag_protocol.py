"""The protocol of tags: a turn is a thought and then an action or an answer, each inside its tags."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Completion
from calibadv_jax.core.tags import (
    CLOSE_INFORMATION,
    OPEN_INFORMATION,
    OPEN_THINK,
    parse_turn,
    text_after_opening,
    text_with_opening,
)
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Question, Turn
from calibadv_jax.rollout.actions import grammar_of, invalid_notice
from calibadv_jax.rollout.observation import Observations, make_neutraliser
from calibadv_jax.rollout.prompts import write_prompt
from calibadv_jax.rollout.protocol import (
    Observation,
    ProtocolSettings,
    TurnProtocol,
    added_ids,
    call_action,
    read_text,
)

# The text before the answer of a turn that does not think.
ANSWER_BEGINNING = f"{OPEN_THINK}</think>\n<answer>"


def begin_answer_in_tags(opening: str) -> tuple[str, str]:
    """Return an empty thought and the tag of the answer, and the space before the answer.

    Args:
        opening: the environment's text before the turn.
    """
    return text_after_opening(opening, ANSWER_BEGINNING), " "


class TagProtocol(TurnProtocol):
    """The protocol of tags.

    Args:
        settings: Settings of the run.
    """

    def __init__(self, settings: ProtocolSettings):
        self.settings = settings
        self.grammar = grammar_of(settings.actions)
        self.neutraliser = make_neutraliser(settings.tokenizer, settings.actions)
        self.opening = settings.prompt.opening
        self.stop_strings = self.grammar.stop_strings
        notice = invalid_notice(settings.actions, self.neutraliser)
        self.observations = Observations(
            settings.tokenizer, settings.rollout.max_observation_length, self.opening, notice
        )

    def write_prompt(self, question: Question) -> tuple[str, str]:
        """Return a question's prompt as text, and the end of it that begins the first turn."""
        settings = self.settings
        return write_prompt(question, settings.tokenizer, settings.prompt, self.neutraliser, settings.actions)

    def begin_answer(self, opening: str) -> tuple[str, str]:
        """Return an empty thought and the tag of the answer, and a space."""
        return begin_answer_in_tags(opening)

    @property
    def control_ids(self) -> frozenset[int]:
        """The tags that the tokenizer has as tokens of their own."""
        return added_ids(self.settings.tokenizer, "".join(self.grammar.tags))

    def diagnose(self) -> list[str]:
        """Return the number of tokens of each tag, and whether the tokenizer supports tool calls too."""
        tokenizer = self.settings.tokenizer
        token_counts = [f"{tag} {len(encode(tokenizer, tag))}" for tag in self.grammar.tags]
        return [f"tokens of each tag: {', '.join(token_counts)}", self._tool_call_support()]

    def _tool_call_support(self) -> str:
        """Return whether the tokenizer's chat template supports the protocol of tool calls."""
        from calibadv_jax.protocols.formats import detect_format

        prompt = self.settings.prompt
        try:
            call_format = detect_format(
                self.settings.tokenizer, prompt.chat_template_kwargs, prompt.date_string
            )
        except UserError as error:
            return f"rollout.protocol: tags; tool_calls is not possible: {error}"
        return f"rollout.protocol: tags; tool_calls is possible too, in the format {call_format.name}"

    def read_turn(self, completion: Completion, opening: str) -> Turn:
        """Return the turn that a completion is: its first closed action or answer."""
        text = read_text(completion, self.settings.tokenizer)
        parsed = parse_turn(text_with_opening(opening, text), completion.stop_reason, self.grammar)
        return Turn(
            kind=parsed.kind,
            token_ids=np.asarray(completion.token_ids, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            text=text,
            think=parsed.think,
            query=parsed.query,
            answer=parsed.answer,
            stop_reason=completion.stop_reason,
            policy_versions=completion.policy_versions,
        )

    async def execute(self, turn: Turn, actions: Mapping[str, Action]) -> Observation:
        """Execute the action of a turn, and put the reply between the tags of an observation."""
        action = actions[turn.kind]
        observations = self.observations.for_action(action)
        result = await call_action(
            action,
            lambda: action.parse(turn.query),
            self.settings,
            self.neutraliser,
            observations.max_length,
        )
        ids, text = observations.information(result.text)
        return Observation(ids, text, result.documents, result.is_refused)

    def notice(self, turn: Turn) -> Observation:
        """Return the notice after an invalid turn, which says how each action is called."""
        return Observation(*self.observations.invalid())

    def reply_texts(self, turn: Turn) -> list[str]:
        """Return the text between the tags of an observation; nothing for a notice."""
        _, _, after_opening = turn.observation_text.partition(OPEN_INFORMATION)
        shown, _, _ = after_opening.rpartition(CLOSE_INFORMATION)
        return [shown]
