"""Demonstrations in the tokens of the agent loop, for the protocol of tool calls.

Turns in tags become messages with a call, so that the same file serves both protocols.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from calibadv_jax.commands.demonstration_tokens import DemonstrationEncoder, render_reply
from calibadv_jax.config import Config
from calibadv_jax.core.answers import extract_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, parse_object
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import CLOSE_THINK, OPEN_THINK, parse_turn
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.core.trajectory import Document, Turn
from calibadv_jax.data.demonstrations import (
    Demonstration,
    DemoReply,
    DemoTurn,
    MessageReader,
    MessageTurn,
)
from calibadv_jax.rollout.actions import SearchAction, grammar_of
from calibadv_jax.rollout.protocol import CallResult, Observation, TurnProtocol
from calibadv_jax.rollout.tool_protocol import ToolProtocol

# How an answer stands in a message, by the place of the answer.
ANSWER_FORMS = {"whole": "{}", "tag": "<answer> {} </answer>", "box": "\\boxed{{{}}}"}
_THOUGHT_TAG = re.compile(f"{OPEN_THINK}|{CLOSE_THINK}")
# Characters of a turn that a message quotes.
_QUOTED_LENGTH = 80
_NO_IDS = np.zeros(0, np.int32)


class ToolEncoder(DemonstrationEncoder):
    """Writes demonstrations for the protocol of tool calls.

    Args:
        config: The config.
        protocol: Its protocol.
    """

    protocol: ToolProtocol

    def __init__(self, config: Config, protocol: TurnProtocol):
        assert isinstance(protocol, ToolProtocol)
        super().__init__(config, protocol)
        self.grammar = grammar_of(protocol.settings.actions)

    @property
    def message_reader(self) -> MessageReader:
        """What reads messages with tool calls."""
        return MessageReader(self._read_text, self.protocol.flaw_of)

    def _read_text(self, text: str) -> AssistantMessage:
        """Return the message of a text, whose thought and calls may be written in the format."""
        if any(marker in text for marker in self.protocol.format.markers):
            return self.protocol.template.parse(text, "")
        return AssistantMessage("", text, ())

    @property
    def turn_neutraliser(self) -> Neutraliser:
        """What removes tags, control tokens and the format's markers from a text."""
        return self.protocol.neutraliser

    def shown_documents(self, documents: Sequence[Document]) -> str:
        """Return the observation with the documents of a search."""
        action = self.actions[SearchAction.name]
        call = _call_of_body(action, "query", "search")
        turn = Turn(call.name, _NO_IDS, np.zeros(0, np.float32), calls=(call,))
        return self._observe(turn, (DemoReply(tuple(documents)),)).text

    def turns(self, demonstration: Demonstration, opening: str) -> Iterator[Turn]:
        """Yield the turns, each with its observation; UserError if a turn cannot be written."""
        place = f"demonstration of question {demonstration.question.id!r}"
        last = len(demonstration.turns)
        for number, demo_turn in enumerate(demonstration.turns, 1):
            message = self.message_of(demo_turn, f"{place}, turn {number}")
            if not message.calls and number < last:
                raise UserError(f"{place}: turn {number} of {last} is an answer; remove the turns behind it")
            text = self.protocol.template.write_turn(message, opening)
            turn = self.read_turn(text, opening, "eos", demo_turn.trained)
            replies = replies_of(demo_turn)
            if message.calls and (replies or number < last):
                observation = self._observe(turn, replies)
                turn.observation_ids = observation.ids
                turn.observation_text = observation.text
                turn.documents = observation.documents
            yield turn
            opening = self.protocol.opening

    def _observe(self, turn: Turn, replies: Sequence[DemoReply]) -> Observation:
        """Return the replies to the calls of a turn; a missing reply is empty."""
        results = []
        for index, call in enumerate(turn.calls):
            reply = replies[index] if index < len(replies) else DemoReply()
            text, documents = render_reply(reply, self.actions[call.name], self.protocol.neutraliser)
            results.append(CallResult(text, documents))
        return self.protocol.observe(turn, results)

    def message_of(self, turn: DemoTurn, place: str) -> AssistantMessage:
        """Return a turn of a demonstration as a message.

        Args:
            turn: The turn, in tags or as a message.
            place: Where it stands, for messages.

        Raises:
            UserError: It cannot be a message: text stands behind the action, the arguments are not those of
                the tool, or the answer does not fit its place.
        """
        message = turn.message if isinstance(turn, MessageTurn) else self._read_tags(turn.text, place)
        flaw = self.protocol.flaw_of(message)
        if flaw:
            raise UserError(f"{place}: {flaw} Correct it, or remove the demonstration")
        return message

    def _read_tags(self, text: str, place: str) -> AssistantMessage:
        """Return a turn in tags as a message; all text before the action is its thought."""
        parsed = parse_turn(text, "eos", self.grammar)
        if parsed.kind not in (*self.actions, "answer"):
            raise UserError(f"{place}: neither an action nor an answer in {text[:_QUOTED_LENGTH]!r}")
        before, _, rest = text.partition(f"<{parsed.kind}>")
        _, _, behind = rest.partition(f"</{parsed.kind}>")
        if behind.strip():
            raise UserError(
                f"{place}: text stands behind </{parsed.kind}>: {behind.strip()[:40]!r}; remove it"
            )
        thought = " ".join(piece.strip() for piece in _THOUGHT_TAG.split(before)).strip()
        if parsed.kind != "answer":
            call = _call_of_body(self.actions[parsed.kind], parsed.query, place)
            return AssistantMessage(thought, "", (call,))
        answer_from = self.protocol.settings.answer_from
        content = ANSWER_FORMS[answer_from].format(parsed.answer)
        if extract_answer(content, answer_from) != parsed.answer:
            raise UserError(
                f"{place}: the answer {parsed.answer[:_QUOTED_LENGTH]!r} does not fit reward.answer_from="
                f"{answer_from}; choose another one"
            )
        return AssistantMessage(thought, content, ())


def replies_of(turn: DemoTurn) -> tuple[DemoReply, ...]:
    """Return the replies to the calls of a turn."""
    if isinstance(turn, MessageTurn):
        return turn.replies
    if turn.documents or turn.observation:
        return (DemoReply(turn.documents, turn.observation),)
    return ()


def _call_of_body(action: Action, body: str, place: str) -> ToolCall:
    """Return the call that the body of an action stands for."""
    schema = action.schema()
    if action.parameters is None:
        (argument,) = schema.parameters["properties"]
        return ToolCall(action.name, {argument: body} if body else {})
    arguments = parse_object(body) if body else {}
    if arguments is None:
        properties = list(schema.parameters.get("properties", {}))
        if len(properties) == 1:
            return ToolCall(action.name, {properties[0]: body})
        names = ", ".join(f'"{name}"' for name in properties)
        raise UserError(f"{place}: <{action.name}> must hold a JSON object with {names}, got {body[:60]!r}")
    return ToolCall(action.name, arguments)
