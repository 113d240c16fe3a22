"""What the environment writes in a chat template: prompts, replies to calls, and notices.

Nothing of it is known beforehand. Conversations with probes in them are rendered, and what stands behind the
last probe of a call, from the end-of-turn token on, is the environment's part. The turns of the policy are
never rendered: they stay the tokens that were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tokens import added_token_strings, normaliser_of
from calibadv_jax.core.tool_calls import (
    AssistantMessage,
    ToolCall,
    ToolSchema,
    readable_call,
    rewrite_texts,
)
from calibadv_jax.protocols.call_format import CallFormat
from calibadv_jax.protocols.call_json import typed_arguments
from calibadv_jax.protocols.probes import (
    QUESTION,
    Probes,
    choose_style,
    first_of,
)
from calibadv_jax.protocols.rendering import (
    ChatMessage,
    MessageStyle,
    TemplateFailure,
    TemplateRenderer,
    assistant_message,
    user_message,
)
from calibadv_jax.protocols.template_date import DEFAULT_DATE

# Markup that a template writes into messages: <tool_call>, <function=, <|im_start|>, [TOOL_RESULTS].
_MARKUP = re.compile(r"</?\w{2,}=?>?|<[|｜][^<>\s]+[|｜]>|\[/?[A-Z]{2,}(?:_[A-Z]+)*\]")
_TAGS_INSTEAD = "choose a policy whose template supports tools, or rollout.protocol=tags"


@dataclass(frozen=True)
class ConversationTemplate:
    """The environment's part of a conversation, in one tokenizer's chat template.

    Attributes:
        renderer: The template with its tools.
        call_format: How the policy writes calls.
        tools: The tools, neutralised, by name.
        style: What the template wants to see in a message with calls.
        neutraliser: Removes control tokens and markers from the texts of `reply` and `notice`.
        generation_prompt: What opens a turn of the policy behind a reply, with the opening.
        opening: The end of it that belongs to the turn: "<think>\\n", or "".
        end_of_call: The control token behind a call.
        end_of_answer: The control token behind an answer.
        end_of_turn: All control tokens that end a turn.
        allows_several_calls: Whether a turn may have several calls.
    """

    renderer: TemplateRenderer
    call_format: CallFormat
    tools: Mapping[str, ToolSchema]
    style: MessageStyle
    neutraliser: Neutraliser
    generation_prompt: str = ""
    opening: str = ""
    end_of_call: str = ""
    end_of_answer: str = ""
    end_of_turn: tuple[str, ...] = ()
    allows_several_calls: bool = False

    @classmethod
    def derive(
        cls,
        tokenizer: Any,
        tools: Sequence[ToolSchema],
        call_format: CallFormat,
        template_kwargs: Mapping[str, Any] | None = None,
        date_string: str = DEFAULT_DATE,
    ) -> ConversationTemplate:
        """Find out what a chat template writes.

        Args:
            tokenizer: A tokenizer of transformers with a chat template.
            tools: The tools; their texts are neutralised here.
            call_format: How the policy writes calls, see `formats.load_format`.
            template_kwargs: `prompt.chat_template_kwargs`.
            date_string: `prompt.date_string`.

        Raises:
            UserError: The template shows no tools, drops or refuses calls or their answers, or writes calls
                in another format; the message has its name. Or a tool has a name with markup.
        """
        neutraliser = Neutraliser(
            control_tokens=added_token_strings(tokenizer),
            normalise=normaliser_of(tokenizer),
            markers=call_format.markers,
        )
        shown_tools = [rewrite_texts(tool, neutraliser.neutralise, "tools") for tool in tools]
        renderer = TemplateRenderer(tokenizer, shown_tools, template_kwargs or {}, date_string)
        _check_tools_shown(renderer, shown_tools)
        style = choose_style(renderer, call_format, shown_tools[0].name)
        probes = Probes(renderer, call_format, style, shown_tools[0].name)
        end_of_call, end_of_answer, end_of_turn = probes.turn_ends()
        if not probes.shows_thoughts():
            style = replace(style, thought_tags=call_format.thought_tags)
        markup = (*call_format.markers, *call_format.thought_tags, *probes.markup(_MARKUP))
        markers = tuple(dict.fromkeys(markup))
        template = cls(
            renderer=renderer,
            call_format=call_format,
            tools={tool.name: tool for tool in shown_tools},
            style=style,
            neutraliser=replace(neutraliser, markers=markers),
            end_of_call=end_of_call,
            end_of_answer=end_of_answer,
            end_of_turn=end_of_turn,
            allows_several_calls=probes.allows_several_calls(),
        )
        generation_prompt = probes.generation_prompt()
        return replace(
            template,
            generation_prompt=generation_prompt,
            opening=template._opening_in(generation_prompt),
        )

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts with which untrusted text could forge a part of the protocol; control tokens apart."""
        return self.neutraliser.markers

    def prompt(self, messages: Sequence[ChatMessage]) -> tuple[str, str]:
        """Return the prompt of a conversation.

        Args:
            messages: Messages of the roles system, user and assistant, whose untrusted parts are neutralised.

        Returns:
            The text, with the tools and up to the first turn, and the end of it that begins the turn.

        Raises:
            UserError: The template refuses or drops a message.
        """
        roles = " and ".join(dict.fromkeys(str(message["role"]) for message in messages))
        try:
            text = self.renderer.render(messages, opens_turn=True)
            for message in messages:
                if message["role"] in ("system", "user") and message["content"].strip() not in text:
                    raise TemplateFailure(f"it drops the message of the role {message['role']}")
            if self.generation_prompt and text.endswith(self.generation_prompt):
                return text, self.opening
            before_turn = self.renderer.render(messages)
        except TemplateFailure as failure:
            raise UserError(
                f"{self.renderer.title} fails on messages of the roles {roles}: {failure}; leave out the"
                ' message that it does not take (prompt.system=""), or correct the template'
            ) from failure
        opened = text.removeprefix(before_turn) if text.startswith(before_turn) else ""
        return text, self._opening_in(opened)

    def parse(self, text: str, opening: str | None = None) -> AssistantMessage:
        """Return what a turn of the policy says.

        Args:
            text: The decoded sampled tokens, without the end-of-turn token.
            opening: What the environment wrote at the beginning of the turn; None: `opening`.

        Returns:
            The message as the format reads it, with the types of the tools' schemas. A turn with several
            calls has a flaw and no calls if the template allows only one.
        """
        message = self.call_format.parse(text, self.opening if opening is None else opening)
        if len(message.calls) > 1 and not self.allows_several_calls:
            return replace(message, calls=(), flaw="A turn may have one call only.")
        if self.call_format.writes_types:
            return message
        calls = []
        for call in message.calls:
            tool = self.tools.get(call.name)
            calls.append(call if tool is None else typed_arguments(call, tool))
        return replace(message, calls=tuple(calls))

    def reply(self, calls: Sequence[ToolCall], texts: Sequence[str], ended_by: str) -> str:
        """Return the environment's part behind a turn with calls.

        Args:
            calls: The calls of the turn. The name of an unknown tool is replaced by that of a tool.
            texts: The answer to each call. Control tokens and markers in them are neutralised.
            ended_by: The control token that ended the turn; "" if none did.

        Returns:
            The end of the turn if it was not ended by one of `end_of_turn`, the answers, and what opens the
            next turn. `encode` returns its tokens.
        """
        probes = Probes(self.renderer, self.call_format, self.style, next(iter(self.tools)))
        names = [call.name if call.name in self.tools else probes.tool_name for call in calls]
        neutral = [self.neutraliser.neutralise_markup(text) for text in texts]
        text = probes.reply(names, neutral)
        if ended_by in self.end_of_turn:
            return text.removeprefix(first_of(self.renderer.control_tokens, text))
        return text

    def notice(self, text: str, ended_by: str) -> str:
        """Return the environment's part behind a turn without an executable call.

        The notice has the form of an answer to a call: a message of the user would begin a new request, at
        which templates drop the thoughts.

        Args:
            text: The notice. Control tokens and markers in it are neutralised.
            ended_by: The control token that ended the turn; "" if none did.
        """
        return self.reply([ToolCall(next(iter(self.tools)), {})], [text], ended_by)

    def encode(self, text: str, ended_by: str) -> list[int]:
        """Return the token ids of the environment's part, as they are behind the turn.

        They are those of the text behind that token, see `TemplateRenderer.encode`.

        Args:
            text: What `reply` or `notice` returned.
            ended_by: The control token that ended the turn; "" if none did.
        """
        return self.renderer.encode(text, behind=ended_by)

    def write_turn(self, message: AssistantMessage, opening: str) -> str:
        """Return a turn as the policy should write it, with the control token that ends it.

        It is spelled as the template spells it while it is the newest message; if that is not the whole turn,
        as the format writes it.

        Args:
            message: The turn; its texts are stripped.
            opening: What the environment wrote at the beginning of the turn.

        Raises:
            UserError: The turn cannot be written so that `parse` reads it again.
        """
        end = self.end_of_call if message.calls else self.end_of_answer
        question = [user_message(QUESTION)]
        try:
            before = self._prompt_of_question
            newest = self.renderer.render([*question, self.chat_message(message)])
        except TemplateFailure as failure:
            raise UserError(
                f"{self.renderer.title} refuses a turn of the assistant: {failure}; leave the turn out"
            ) from failure
        spelled = ""
        if newest.startswith(before) and before.endswith(opening):
            spelled, _, _ = newest[len(before) :].partition(end)
        for text in (spelled, self.call_format.write_turn(message, opening)):
            if self.parse(text, opening) == message and not any(token in text for token in self.end_of_turn):
                return text + end
        if message.thought and self.call_format.thought_tags[1] in opening:
            raise UserError(
                f"{self.renderer.title} closes the thought before the turn, but a turn has the thought"
                f" {message.thought[:60]!r}; remove the thoughts, or let the template think"
                " (prompt.chat_template_kwargs)"
            )
        calls = "; ".join(readable_call(call) for call in message.calls)
        raise UserError(
            f"{self.renderer.title} cannot write the turn {(calls or message.content)[:120]!r} so that the"
            f" format {self.call_format.name} reads it again; remove markup from its texts, or leave it out"
        )

    @cached_property
    def _prompt_of_question(self) -> str:
        """The prompt of a question alone."""
        return self.renderer.render([user_message(QUESTION)], opens_turn=True)

    def chat_message(self, message: AssistantMessage) -> ChatMessage:
        """Return a turn of the policy as a message for this chat template."""
        return assistant_message(message, self.style)

    def _opening_in(self, generation_prompt: str) -> str:
        """Return the end of a generation prompt that begins the turn."""
        start = generation_prompt.find(self.call_format.thought_tags[0])
        return generation_prompt[start:] if start >= 0 else ""


def _check_tools_shown(renderer: TemplateRenderer, tools: Sequence[ToolSchema]) -> None:
    """Refuse a template that shows no tools."""
    if not tools:
        raise UserError(
            "rollout.protocol is tool_calls, but there is no tool: add one, or use the protocol tags"
        )
    messages = [user_message(QUESTION)]
    try:
        with_tools = renderer.render(messages, opens_turn=True)
        without_tools = renderer.render(messages, opens_turn=True, shows_tools=False)
    except TemplateFailure as failure:
        raise UserError(
            f"{renderer.title} fails on a question with tools: {failure}; {_TAGS_INSTEAD}"
        ) from failure
    hidden = [tool.name for tool in tools if tool.name not in with_tools]
    if with_tools == without_tools or hidden:
        raise UserError(f"{renderer.title} shows no tools to the policy; {_TAGS_INSTEAD}")
