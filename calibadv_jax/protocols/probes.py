"""Conversations with probes, which show what a chat template writes around the turns of the policy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import CallFormat
from calibadv_jax.protocols.rendering import (
    STYLES,
    ChatMessage,
    MessageStyle,
    TemplateFailure,
    TemplateRenderer,
    assistant_message,
    tool_message,
    user_message,
)

# Texts that no template writes by itself: letters and digits only, so that no escape changes them.
QUESTION = "calibadvquestion"
_PROBE = "calibadvprobe"
_ANSWER = "calibadvanswer"
_THOUGHT = "calibadvthought"
# Why a template cannot be used whose turns have no end that a sampler knows.
NO_END = "it ends a turn with no control token; add what it writes there to the tokenizer's special tokens"
_TAGS_INSTEAD = "choose a policy whose template supports tools, or rollout.protocol=tags"


class NoCallShown(Exception):
    """A template renders a call as nothing."""


def probe_call(name: str, index: int = 0) -> ToolCall:
    """Return a call whose only argument is a probe of its own."""
    return ToolCall(name, {"probe": f"{_PROBE}{index}"})


def choose_style(renderer: TemplateRenderer, call_format: CallFormat, tool_name: str) -> MessageStyle:
    """Return the style of messages in which a template writes a call that the format reads.

    Args:
        renderer: The template.
        call_format: The format.
        tool_name: Name of a tool.

    Raises:
        UserError: There is none; the message says why, and names the template.
    """
    reasons = []
    for style in STYLES:
        try:
            written = written_call(renderer, style, probe_call(tool_name))
        except NoCallShown:
            reasons.append("it renders calls as nothing")
            continue
        except TemplateFailure as failure:
            reasons.append(f"it fails on a call: {failure}")
            continue
        if reads_probe(renderer, call_format, written, tool_name):
            return style
        if Probes(renderer, call_format, style, tool_name).is_endless():
            reasons.append(NO_END)
            continue
        reader = f"tool_calls.format {call_format.name} does not read"
        reasons.append(f"{reader} its calls, such as {shortened(written)}")
    raise UserError(f"{renderer.title} does not work with tools: {reasons[0]}; {_TAGS_INSTEAD}")


def written_call(renderer: TemplateRenderer, style: MessageStyle, call: ToolCall) -> str:
    """Return how a template writes a turn with a call, from its opening to the end of the conversation.

    Args:
        renderer: The template.
        style: The style of the message.
        call: The call; its arguments are texts.

    Raises:
        NoCallShown: The call is not there.
        TemplateFailure: The template raises an error.
    """
    messages = [user_message(QUESTION)]
    prompt = renderer.render(messages, opens_turn=True)
    turn = assistant_message(AssistantMessage("", "", (call,)), style)
    text = renderer.render([*messages, turn])
    # What stands before the question may depend on the messages behind it.
    _, _, opened = prompt.rpartition(QUESTION)
    _, _, turn_text = text.rpartition(QUESTION)
    written = turn_text[_length_of_common_beginning(opened, turn_text) :]
    if any(part not in written for part in (call.name, *call.arguments.values())):
        raise NoCallShown
    return written


def reads_probe(renderer: TemplateRenderer, call_format: CallFormat, written: str, tool_name: str) -> bool:
    """Return whether a format reads the call that `written_call` has returned."""
    turn = written[: place_of_end(renderer, call_format, written, 1)]
    open_tag, close_tag = call_format.thought_tags
    if close_tag in turn and open_tag not in turn:
        # The prompt opens the thought that the message closes.
        turn = open_tag + turn
    message = call_format.parse(turn, "")
    return message.calls == (probe_call(tool_name),) and not message.flaw


def shortened(written: str) -> str:
    """Return the beginning of a written call as one line, for messages."""
    return " ".join(written.split())[:120]


def first_of(tokens: Iterable[str], text: str) -> str:
    """Return the control token with which a text begins; "" if there is none."""
    return max((token for token in tokens if text.startswith(token)), key=len, default="")


@dataclass(frozen=True)
class Probes:
    """Conversations with probes in one template.

    Attributes:
        renderer: The template.
        call_format: How the policy writes calls.
        style: What the template wants to see in a message with calls.
        tool_name: Name of a tool.
    """

    renderer: TemplateRenderer
    call_format: CallFormat
    style: MessageStyle
    tool_name: str

    def reply(self, names: Sequence[str], texts: Sequence[str]) -> str:
        """Return what the template writes behind a turn with calls, up to the next turn of the policy.

        Args:
            names: Name of the tool that each call names.
            texts: The answer to each call.

        Raises:
            UserError: The template refuses the answers.
        """
        try:
            text = self.renderer.render(self._conversation(names, texts), opens_turn=True)
        except TemplateFailure as failure:
            raise UserError(
                f"{self.renderer.title} refuses the answer of a tool: {failure}; {_TAGS_INSTEAD}"
            ) from failure
        return text[place_of_end(self.renderer, self.call_format, text, len(names)) :]

    def is_endless(self) -> bool:
        """Return whether no control token stands behind a call, not even that of the answer."""
        try:
            text = self.renderer.render(self._conversation([self.tool_name], [_ANSWER]))
        except TemplateFailure:
            return False
        return place_of_end(self.renderer, self.call_format, text, 1) == len(text)

    def generation_prompt(self) -> str:
        """Return what opens a turn of the policy behind an answer of a tool."""
        conversation = self._conversation([self.tool_name], [_ANSWER])
        before = self.renderer.render(conversation)
        opened = self.renderer.render(conversation, opens_turn=True)
        return opened.removeprefix(before) if opened.startswith(before) else ""

    def shows_thoughts(self) -> bool:
        """Return whether the template shows the thought of the newest message."""
        turn = assistant_message(AssistantMessage(_THOUGHT, "", (probe_call(self.tool_name),)), self.style)
        try:
            return _THOUGHT in self.renderer.render([user_message(QUESTION), turn])
        except TemplateFailure:
            return False

    def turn_ends(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the control token behind a call, the one behind an answer, and all that end a turn.

        Raises:
            UserError: The answer of a tool is refused or dropped, or no control token ends a turn.
        """
        reply = self.reply([self.tool_name], [_ANSWER])
        if _ANSWER not in reply:
            raise UserError(f"{self.renderer.title} drops the answers of tools; {_TAGS_INSTEAD}")
        end_of_call = first_of(self.renderer.control_tokens, reply)
        if not end_of_call:
            raise UserError(f"{self.renderer.title} does not work with tools: {NO_END}; {_TAGS_INSTEAD}")
        if end_of_call in self.generation_prompt():
            raise UserError(
                f"{self.renderer.title} does not work with tool_calls.format {self.call_format.name}: behind"
                f" a call it seems to write {end_of_call}, which opens turns too; choose another format"
            )
        end_of_answer = self._end_of_answer() or str(self.renderer.tokenizer.eos_token or "")
        others = [token for token in self.call_format.turn_ends if token in self.renderer.control_tokens]
        every_end = dict.fromkeys(end for end in (end_of_call, end_of_answer, *others) if end)
        return end_of_call, end_of_answer, tuple(every_end)

    def allows_several_calls(self) -> bool:
        """Return whether the template writes two calls of a turn, and then both answers, in order."""
        names = [self.tool_name, self.tool_name]
        texts = [f"{_ANSWER}0", f"{_ANSWER}1"]
        try:
            text = self.renderer.render(self._conversation(names, texts))
        except TemplateFailure:
            return False
        expected = [*(probe_call(name, index).arguments["probe"] for index, name in enumerate(names)), *texts]
        places = [text.find(probe) for probe in expected]
        return -1 not in places and places == sorted(places)

    def markup(self, pattern: re.Pattern[str]) -> tuple[str, ...]:
        """Return the markup that the template writes for calls, answers, and turns.

        Args:
            pattern: Pattern of a piece of markup.
        """
        text = self.renderer.render(self._conversation([self.tool_name], [_ANSWER]), opens_turn=True)
        _, _, behind_question = text.rpartition(QUESTION)
        return tuple(dict.fromkeys(pattern.findall(behind_question)))

    def _conversation(self, names: Sequence[str], texts: Sequence[str]) -> list[ChatMessage]:
        """Return a question, a turn with calls, and their answers."""
        calls = tuple(probe_call(name, index) for index, name in enumerate(names))
        turn = assistant_message(AssistantMessage("", "", calls), self.style)
        answers = [
            tool_message(call, index, text)
            for index, (call, text) in enumerate(zip(calls, texts, strict=True))
        ]
        return [user_message(QUESTION), turn, *answers]

    def _end_of_answer(self) -> str:
        """Return the control token behind an answer; "" if there is none."""
        turn = assistant_message(AssistantMessage("", _ANSWER, ()), self.style)
        conversation = [user_message(QUESTION), turn]
        for more in ([], [user_message(QUESTION)]):
            try:
                text = self.renderer.render([*conversation, *more])
            except TemplateFailure:
                continue
            _, _, behind = text.rpartition(_ANSWER)
            match = self.renderer.control_pattern.search(behind)
            if match:
                return match[0]
        return ""


def place_of_end(renderer: TemplateRenderer, call_format: CallFormat, text: str, num_calls: int) -> int:
    """Return where the last call of a conversation with probes ends, and the end-of-turn token begins.

    Args:
        renderer: The template.
        call_format: How calls are written: control tokens that are part of a call do not end the turn.
        text: The conversation.
        num_calls: Number of calls of its turn.

    Returns:
        A position in the text; its length if no control token follows.
    """
    start = text.find(probe_call("", num_calls - 1).arguments["probe"])
    parts_of_calls = call_format.call_tokens()
    for match in renderer.control_pattern.finditer(text, max(start, 0)):
        if match[0] not in parts_of_calls:
            return match.start()
    return len(text)


def _length_of_common_beginning(opened: str, text: str) -> int:
    """Return how many characters an opened turn and a turn have in common, without half of a tag."""
    common = os.path.commonprefix([opened, text])
    if common == opened:
        return len(common)
    tag = max(common.rfind("<"), common.rfind("["))
    is_open = tag > max(common.rfind(">"), common.rfind("]"))
    return tag if is_open else len(common)
