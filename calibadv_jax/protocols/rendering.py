"""Renders conversations through a tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tokens import added_token_strings, encode
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall, ToolSchema
from calibadv_jax.core.user_functions import describe_failure
from calibadv_jax.protocols.template_date import fix_date

# A message of a conversation, as chat templates take it.
ChatMessage = dict[str, Any]


class TemplateFailure(Exception):
    """A chat template refuses a conversation. The message is the reason, in one line."""


@dataclass(frozen=True)
class MessageStyle:
    """What a chat template wants to see in an assistant's message with calls.

    Attributes:
        arguments_as_text: Whether the arguments are a text of JSON, and no object.
        has_empty_content: Whether a message without content has an empty text, and no missing key.
        thought_tags: What opens and closes a thought in the content, for templates that show no thoughts of
            their own; None: thoughts are given apart.
    """

    arguments_as_text: bool = False
    has_empty_content: bool = True
    thought_tags: tuple[str, str] | None = None


# The styles, in the order in which they are tried.
STYLES = (
    MessageStyle(),
    MessageStyle(has_empty_content=False),
    MessageStyle(arguments_as_text=True),
    MessageStyle(arguments_as_text=True, has_empty_content=False),
)


class TemplateRenderer:
    """A tokenizer's chat template with its tools, variables and date.

    Attributes:
        tokenizer: The tokenizer.
        title: What messages call the template.
        control_tokens: Control tokens of the tokenizer, the longest first.
        control_pattern: Pattern of a control token.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[ToolSchema],
        template_kwargs: Mapping[str, Any],
        date_string: str,
    ):
        """Take the template of a tokenizer.

        Args:
            tokenizer: A tokenizer of transformers.
            tools: The tools, neutralised.
            template_kwargs: Further variables of the template, `prompt.chat_template_kwargs`.
            date_string: The date that the template shows, `prompt.date_string`.

        Raises:
            UserError: There is no template, or it uses none of these variables.
        """
        self.tokenizer = tokenizer
        self.title = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
        # Longest first, since a token may be part of another.
        self.control_tokens = tuple(
            sorted(added_token_strings(tokenizer), key=lambda token: (-len(token), token))
        )
        self.control_pattern = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        self._functions = [tool.as_function() for tool in tools]
        if getattr(tokenizer, "chat_template", None) is None:
            raise UserError(
                "rollout.protocol is tool_calls, but the tokenizer has no chat template; choose a policy that"
                " has one, or rollout.protocol=tags"
            )
        template = tokenizer.get_chat_template(tools=self._functions)
        unknown = [name for name in template_kwargs if name not in template]
        if unknown:
            raise UserError(
                f"prompt.chat_template_kwargs: {self.title} uses no {', '.join(unknown)}; leave it out"
            )
        self._template, date_variables = fix_date(template, date_string)
        self._variables = {**date_variables, **template_kwargs}

    def render(
        self, messages: Sequence[ChatMessage], opens_turn: bool = False, shows_tools: bool = True
    ) -> str:
        """Return a conversation as the template writes it.

        Args:
            messages: The messages.
            opens_turn: Whether the template opens a turn of the assistant behind them.
            shows_tools: Whether the template gets the tools.

        Raises:
            TemplateFailure: The template raises an error.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=self._functions if shows_tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=opens_turn,
                **self._variables,
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise TemplateFailure(describe_failure(error)) from error
        return str(text)

    def encode(self, text: str, behind: str = "") -> list[int]:
        """Return the token ids of a text, without special tokens around it.

        Args:
            text: The text.
            behind: What stands before it. Tokenizers treat the beginning of a text, or white space behind a
                control token, in their own way.

        Returns:
            The ids of the text where it stands; on its own, if the tokenizer joins both at the border.
        """
        if not behind:
            return encode(self.tokenizer, text)
        # Control tokens part a text: what stands before the last of them does not matter.
        context = behind[max((match.start() for match in self.control_pattern.finditer(behind)), default=0) :]
        context_ids = encode(self.tokenizer, context)
        ids = encode(self.tokenizer, context + text)
        if ids[: len(context_ids)] == context_ids:
            return ids[len(context_ids) :]
        return encode(self.tokenizer, text)


def user_message(text: str) -> ChatMessage:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def tool_message(call: ToolCall, index: int, text: str) -> ChatMessage:
    """Return the message that answers a call.

    Args:
        call: The call.
        index: Number of the call within its turn, from 0.
        text: The answer.
    """
    return {"role": "tool", "name": call.name, "tool_call_id": _call_id(index), "content": text}


def assistant_message(message: AssistantMessage, style: MessageStyle) -> ChatMessage:
    """Return a turn of the policy as a message for a chat template.

    Args:
        message: The turn.
        style: What the template wants to see.
    """
    chat_message: ChatMessage = {"role": "assistant"}
    content = message.content
    if message.thought and style.thought_tags is not None:
        open_tag, close_tag = style.thought_tags
        content = f"{open_tag}\n{message.thought}\n{close_tag}\n\n{content}"
    if content or not message.calls or style.has_empty_content:
        chat_message["content"] = content
    if message.thought and style.thought_tags is None:
        # gpt-oss has another name for it than all others.
        chat_message["reasoning_content"] = message.thought
        chat_message["thinking"] = message.thought
    if message.calls:
        calls = []
        for index, call in enumerate(message.calls):
            arguments: Any = call.arguments
            if style.arguments_as_text:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            calls.append({"id": _call_id(index), "type": "function", "function": function})
        chat_message["tool_calls"] = calls
    return chat_message


def _call_id(index: int) -> str:
    """Return an id of nine letters and digits, as Mistral's templates want it."""
    return f"call{index:05d}"
