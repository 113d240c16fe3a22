"""The protocol of tool calls: turns are messages in the tool-call format of the tokenizer's chat template.

The first prompt is the template's. What the policy samples is never rendered again: the environment's part
after a turn is derived from the template once (`protocols.chat_template`), and tokenized on its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from calibadv_jax.config import ToolCallsConfig
from calibadv_jax.config.sections.data import ANSWER_FORMAT_PLACE, FROM_DATA, QUESTION_PLACE
from calibadv_jax.core.answers import MISSING_ANSWER, extract_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Completion
from calibadv_jax.core.tags import well_formed
from calibadv_jax.core.tokens import decode, encode
from calibadv_jax.core.tool_calls import (
    AssistantMessage,
    ToolCall,
    ToolSchema,
    check_schema,
    readable_call,
    schema_fault,
)
from calibadv_jax.core.trajectory import Document, Question, Turn
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.formats import load_format
from calibadv_jax.protocols.template_check import check_template, require_exact
from calibadv_jax.rollout.concurrency import gather
from calibadv_jax.rollout.observation import cut_early, make_neutraliser
from calibadv_jax.rollout.prompts import ANSWER_FORMATS, messages_of_data, shown_question
from calibadv_jax.rollout.protocol import (
    CallResult,
    Observation,
    ProtocolSettings,
    TurnProtocol,
    added_ids,
    call_action,
    read_text,
)

# What stands before the answer in a message, by the place of the answer.
ANSWER_PLACES = {"whole": "", "tag": "<answer>", "box": "\\boxed{"}
# Characters of a notice that say what was wrong, and of a tool's name in it.
LONGEST_FLAW = 400
LONGEST_NAME = 60
# What `reply_texts` puts in the place of a reply: letters, which no template changes.
_REPLY = "calibadvreply"
# Chat templates whose derived parts are kept in memory.
_KEPT_TEMPLATES = 8


class ToolProtocol(TurnProtocol):
    """The protocol of tool calls.

    Args:
        settings: Settings of the run.

    Raises:
        UserError: The chat template is missing or does not fit, or a tool has no valid schema.
    """

    def __init__(self, settings: ProtocolSettings):
        self.settings = settings
        tokenizer = settings.tokenizer
        self.schemas = {action.name: action.schema() for action in settings.enabled_actions}
        for schema in self.schemas.values():
            check_schema(schema, "tools")
        self.template = _derive(
            tokenizer,
            json.dumps([asdict(schema) for schema in self.schemas.values()]),
            settings.tool_calls,
            json.dumps(settings.prompt.chat_template_kwargs),
            settings.prompt.date_string,
        )
        self.neutraliser = make_neutraliser(tokenizer, settings.actions, self.template.markers)
        self.format = self.template.call_format
        self.opening = self.template.opening
        self.stop_strings = self.format.stop_strings
        ids = [tokenizer.convert_tokens_to_ids(token) for token in self.template.end_of_turn]
        self.end_of_turn_ids = frozenset(ids)

    # --- The prompt ---

    def write_prompt(self, question: Question) -> tuple[str, str]:
        """Return a question's prompt as text, and the end of it that begins the first turn."""
        prompt = self.settings.prompt
        if prompt.template == FROM_DATA:
            messages = messages_of_data(question, self.neutraliser.neutralise, self.neutraliser.neutralise)
        else:
            text = self.neutraliser.neutralise(shown_question(question, prompt))
            messages = []
            if prompt.system:
                answer_format = ANSWER_FORMATS[self.settings.answer_from]
                messages.append(("system", prompt.system.replace(ANSWER_FORMAT_PLACE, answer_format)))
            messages.append(("user", text.join(prompt.user.split(QUESTION_PLACE))))
        return self.template.prompt([{"role": role, "content": content} for role, content in messages])

    @property
    def control_ids(self) -> frozenset[int]:
        """The control tokens of a call, and those that end a turn."""
        return added_ids(self.settings.tokenizer, self.format.call_tokens()) | self.end_of_turn_ids

    def describe(self) -> list[str]:
        """Return the format of the calls, and whether the rollout is the template's own rendering."""
        return check_template(self.template).lines()

    # --- The policy's turn ---

    def read_turn(self, completion: Completion, opening: str) -> Turn:
        """Return the turn that a completion is: its calls, or the answer in a message without a call."""
        text = read_text(completion, self.settings.tokenizer)
        message = self.template.parse(text, opening)
        was_cut_off = completion.stop_reason in ("length", "abort")
        answer = ""
        calls: tuple[ToolCall, ...] = ()
        flaw = self.flaw_of(message)
        if was_cut_off:
            kind = "unfinished"
            flaw = f"The turn was cut after {len(completion.token_ids)} tokens."
        elif flaw:
            kind = "invalid"
        elif message.calls:
            calls = message.calls
            kind = _kind(calls)
            # The calls are executed all the same; the reward judges the format.
            flaw = message.flaw
        else:
            kind = "answer"
            answer = extract_answer(message.content, self.settings.answer_from) or ""
        return Turn(
            kind=kind,
            token_ids=np.asarray(completion.token_ids, np.int32),
            logprobs=np.asarray(completion.logprobs, np.float32),
            text=text,
            think=message.thought,
            query=_query(calls),
            answer=answer,
            stop_reason=completion.stop_reason,
            policy_versions=completion.policy_versions,
            calls=calls,
            flaw=flaw,
        )

    def flaw_of(self, message: AssistantMessage) -> str:
        """Return why a message is neither a list of calls that can be executed nor an answer; "" if it is.

        Args:
            message: A message of the policy.
        """
        if not message.calls:
            if message.flaw:
                return message.flaw
            answer_from = self.settings.answer_from
            if extract_answer(message.content, answer_from) is None:
                return f"There is neither a tool call nor an answer: {MISSING_ANSWER[answer_from]}."
            return ""
        max_calls = self.settings.tool_calls.max_calls
        if len(message.calls) > max_calls:
            return f"There are {len(message.calls)} tool calls in one message; at most {max_calls} may be."
        for call in message.calls:
            fault = self._fault_of_call(call)
            if fault:
                return fault
        return ""

    def _fault_of_call(self, call: ToolCall) -> str:
        """Return why a call cannot be executed; "" if it can."""
        schema = self.schemas.get(call.name)
        if schema is None:
            name = call.name[:LONGEST_NAME]
            return f'There is no tool "{name}"; the tools are {", ".join(self.schemas)}.'
        return schema_fault(call.arguments, schema) or self._empty_argument(call)

    def _empty_argument(self, call: ToolCall) -> str:
        """Return that the only argument of an action is empty, if it may not be; otherwise ""."""
        for action in self.settings.enabled_actions:
            if action.name == call.name and action.parameters is None and not action.may_be_empty:
                for name, value in call.arguments.items():
                    if name in self.schemas[call.name].parameters["properties"] and not str(value).strip():
                        return f'The argument "{name}" of {call.name} is empty.'
        return ""

    # --- The environment's reply ---

    async def execute(self, turn: Turn, actions: Mapping[str, Action]) -> Observation:
        """Execute the calls of a turn at the same time, and answer them in their order."""
        calls = zip(turn.calls, self._limits(turn.calls), strict=True)
        results = await gather([self._call(call, actions[call.name], limit) for call, limit in calls])
        return self.observe(turn, results)

    def observe(self, turn: Turn, results: Sequence[CallResult]) -> Observation:
        """Return the observation that answers the calls of a turn.

        Args:
            turn: A turn with calls.
            results: What each call brought.

        Raises:
            UserError: Not even empty texts fit into rollout.max_observation_length.
        """
        limits = self._limits(turn.calls)
        ids, text = self._reply(turn, results, limits)
        documents: tuple[Document, ...] = ()
        for result in results:
            documents += result.documents
        return Observation(ids, text, documents, all(result.is_refused for result in results))

    def _limits(self, calls: Sequence[ToolCall]) -> list[int]:
        """Return the tokens that the reply to each call may have."""
        max_length = self.settings.rollout.max_observation_length
        own_limits = {action.name: action.max_length for action in self.settings.enabled_actions}
        return [min(max_length, own_limits[call.name] or max_length) for call in calls]

    async def _call(self, call: ToolCall, action: Action, max_length: int) -> CallResult:
        """Execute a call, of whose result `max_length` tokens may be shown."""
        return await call_action(
            action,
            lambda: action.parse_arguments(call.arguments),
            self.settings,
            self.neutraliser,
            max_length,
        )

    def _reply(
        self, turn: Turn, results: Sequence[CallResult], limits: Sequence[int]
    ) -> tuple[np.ndarray, str]:
        """Return the environment's part after a turn, with at most `max_observation_length` tokens.

        Args:
            turn: A turn with calls.
            results: What each call brought.
            limits: Tokens that the text of each call may have.

        Returns:
            Token ids, int32 [M], and their text.

        Raises:
            UserError: Not even empty texts fit.
        """
        tokenizer = self.settings.tokenizer
        max_length = self.settings.rollout.max_observation_length
        texts = []
        for result, limit in zip(results, limits, strict=True):
            texts.append(_cut(result.text, tokenizer, limit))
        ended_by = self._ended_by(turn)
        while True:
            text = self.template.reply(turn.calls, texts, ended_by)
            ids = self.template.encode(text, ended_by)
            excess = len(ids) - max_length
            if excess <= 0:
                return np.asarray(ids, np.int32), text
            if not any(texts):
                raise UserError(
                    f"rollout.max_observation_length is {max_length}, but the chat template alone needs"
                    f" {len(ids)} tokens for {len(texts)} replies: raise it, or lower tool_calls.max_calls"
                )
            lengths = [len(encode(tokenizer, text)) for text in texts]
            limit = _common_limit(lengths, sum(lengths) - excess)
            texts = [_cut(text, tokenizer, limit) for text in texts]

    def notice(self, turn: Turn) -> Observation:
        """Return the notice after an invalid turn: what was wrong, and how to go on."""
        flaw = self.neutraliser.neutralise(well_formed(turn.flaw)[:LONGEST_FLAW])
        text = f"{flaw} No tool was called. Call a tool ({', '.join(self.schemas)}), or give the answer."
        ended_by = self._ended_by(turn)
        notice = self.template.notice(text, ended_by)
        return Observation(np.asarray(self.template.encode(notice, ended_by), np.int32), notice)

    def _ended_by(self, turn: Turn) -> str:
        """Return the control token that ended a turn, or "" if something else did."""
        if turn.stop_reason != "eos":
            return ""
        return decode(self.settings.tokenizer, turn.token_ids[-1:].tolist())

    def reply_texts(self, turn: Turn) -> list[str]:
        """Return the reply to each call of a turn, or the notice after an invalid one."""
        calls = turn.calls or (ToolCall(next(iter(self.schemas)), {}),)
        around = self.template.reply(calls, [_REPLY] * len(calls), self._ended_by(turn)).split(_REPLY)
        text = turn.observation_text.removeprefix(around[0])
        texts = []
        for separator in around[1:-1]:
            reply, _, text = text.partition(separator)
            texts.append(reply)
        return [*texts, text.removesuffix(around[-1])]

    def begin_answer(self, opening: str) -> tuple[str, str]:
        """Return what stands before an answer: the end of an open thought, and the place of the answer."""
        place = ANSWER_PLACES[self.settings.answer_from]
        return self.format.write_turn(AssistantMessage("", place, ()), opening), ""

    # --- Thoughts ---

    def thinking_limit(self, turns: Sequence[Turn]) -> int:
        """Return the largest number of tokens of the next turn's thought; 0: it has no limit of its own."""
        follows_closed_thought = bool(turns) and turns[-1].is_closed_thought
        return 0 if follows_closed_thought else self.settings.tool_calls.max_thinking_tokens

    def is_thinking(self, text: str, opening: str) -> bool:
        """Return whether a turn that was cut has not closed its thought."""
        opens, closes = self.format.thought_tags
        whole = opening + text
        return whole.rfind(opens) > whole.rfind(closes)

    def close_thought(self) -> Observation:
        """Return the end of a thought that has reached its limit."""
        text = self.format.thought_closing()
        return Observation(np.asarray(encode(self.settings.tokenizer, text), np.int32), text)


def _query(calls: Sequence[ToolCall]) -> str:
    """Return calls as text for readers: the only argument of a single call, if it is a text; else all."""
    if len(calls) == 1:
        values = list(calls[0].arguments.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0].strip()
    return "; ".join(readable_call(call) for call in calls)


def _kind(calls: Sequence[ToolCall]) -> str:
    """Return the kind of a turn with calls: "search" if one of them searches, else the first call's tool."""
    if any(call.name == "search" for call in calls):
        return "search"
    return calls[0].name


def _common_limit(lengths: Sequence[int], total: int) -> int:
    """Return the largest limit under which lengths that are cut to it sum to at most `total`; at least 0."""
    remaining = max(0, total)
    for index, length in enumerate(sorted(lengths)):
        share = remaining // (len(lengths) - index)
        if length > share:
            return share
        remaining -= length
    return max(lengths)


def _cut(text: str, tokenizer: Any, max_length: int) -> str:
    """Return the beginning of a text that has about `max_length` tokens; "" for 0."""
    if max_length <= 0:
        return ""
    text = cut_early(text, tokenizer, max_length)
    ids = encode(tokenizer, text)
    if len(ids) <= max_length:
        return text
    # The last token may be a part of a character.
    return decode(tokenizer, ids[:max_length]).rstrip("\ufffd")


@lru_cache(maxsize=_KEPT_TEMPLATES)
def _derive(
    tokenizer: Any, tools: str, config: ToolCallsConfig, template_kwargs: str, date_string: str
) -> ConversationTemplate:
    """Return the parts of a chat template; they are derived once, since evaluations make contexts anew."""
    schemas = [ToolSchema(**tool) for tool in json.loads(tools)]
    variables = json.loads(template_kwargs)
    call_format = load_format(config.format, tokenizer, variables, date_string)
    template = ConversationTemplate.derive(tokenizer, schemas, call_format, variables, date_string)
    if config.history == "refuse":
        require_exact(check_template(template))
    return template
