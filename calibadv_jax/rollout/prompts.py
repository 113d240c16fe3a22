"""Prompt templates, and the prompt of a question in tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.tags import OPEN_THINK, Grammar, leaves_thought_open, neutralise, split_at_tags
from calibadv_jax.core.trajectory import Question
from calibadv_jax.rollout.actions import grammar_of, usages
from calibadv_jax.rollout.observation import added_token_strings, encode

_SEARCH = (
    " After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query"
    " </search> and it will return the top searched results between <information> and </information>. You can"
    " search as many times as your want."
)
TEMPLATES = {
    # Data: the prompt of Search-R1 and CalibAdv, word for word, under which their policies were trained.
    "paper": (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
        f" you get new information.{_SEARCH} If you find no"
        " further external knowledge needed, you can directly provide the answer inside <answer> and"
        " </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
        " Question: {question}\n"
    ),
    "short": "Question: {question}\n",
}
FROM_DATA = "from_data"
ENDING = 256  # characters at a prompt's end in which a turn may be opened
_THOUGHT = re.compile("<think>.*", re.DOTALL)
_ENDS_IN_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
ACTIONS = "{actions}"  # in a template: where the actions that are on are listed


def template_text(name: str) -> str:
    """A built-in template, or `name` itself where it contains {question}.

    Raises:
        UserError: neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{question}" in name:
        return name
    raise UserError(
        f"prompt.template is {name!r}: neither one of {', '.join([*TEMPLATES, FROM_DATA])}"
        " nor a text that contains {question}"
    )


def list_actions(actions: Sequence[Action], extra: Collection[str] = ()) -> str:
    """How each action is called, a sentence or two each; none stand for search alone."""
    ways = [
        _SEARCH
        if name == "search"
        else f" You can {purpose} by <{name}> {argument} </{name}>, and you get what it brings between"
        " <information> and </information>."
        for name, purpose, argument in usages(actions, extra)
    ]
    return "".join(ways or [_SEARCH]).replace(ACTIONS, "actions")


def build_prompt(
    question: Question,
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
) -> np.ndarray:
    """Token ids of a question's prompt, int32 [P]; see `open_prompt`."""
    return open_prompt(question, tokenizer, config, max_length, actions)[0]


def open_prompt(
    question: Question,
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
) -> tuple[np.ndarray, str]:
    """Token ids of a question's prompt, int32 [P], and the text at its end that begins the first turn.

    The question is untrusted: tags and special tokens in it are neutralised. So is a prompt of the data,
    which explains the protocol: it keeps the tags that it writes exactly, and nothing else.

    Args:
        actions: those that are on, which the template "paper" lists; none: search alone.

    Raises:
        UserError: longer than `max_length`; chat is "on" for a tokenizer without a chat template; the row has
            no prompt, or one that needs a chat template which is not there; or the chat template fails.
    """
    text, opening = write_prompt(question, tokenizer, config, added_token_strings(tokenizer), actions)
    ids = encode(tokenizer, text)
    if len(ids) > max_length:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(ids)} tokens, but rollout.max_prompt_length is"
            f" {max_length}: raise it, or drop the question"
        )
    return np.asarray(ids, np.int32), opening


def write_prompt(
    question: Question,
    tokenizer: Any,
    config: PromptConfig,
    extra: Collection[str],
    actions: Sequence[Action] = (),
) -> tuple[str, str]:
    """The text that `open_prompt` encodes, and what of its end begins the first turn: see `_opening`.

    Args:
        extra: the tokenizer's `added_token_strings`.
    """
    grammar = grammar_of(actions)
    if config.template == FROM_DATA:
        messages = _carried(question, extra, grammar)
    else:
        asked = question.text
        if config.question_mark:
            asked = asked.strip().removesuffix("?") + "?"
        template, listed = template_text(config.template), list_actions(actions, extra)
        # Apart, so that neither the question nor what a server says of its tools names a place of the other.
        parts = template.split("{question}")
        parts = [part.replace(_SEARCH, listed).replace(ACTIONS, listed.strip()) for part in parts]
        messages = [("user", neutralise(asked, extra, grammar).join(parts))]
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat == "on" and not has_template:
        raise UserError("prompt.chat is 'on', but the tokenizer has no chat template; use 'auto' or 'off'")
    if has_template and config.chat != "off":
        text = _in_chat(messages, tokenizer, config)
        opening = _opening(text, messages[-1][1].strip(), [one for one in extra if one not in grammar.tags])
    elif config.chat_template_kwargs:
        raise UserError("prompt.chat_template_kwargs needs a chat template, and none is used: leave it out")
    elif len(messages) == 1:
        text = messages[0][1]
        opening = _opening(text)
    else:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(messages)} messages, which need a chat template:"
            " choose a tokenizer that has one and prompt.chat=auto, or another prompt.template"
        )
    if config.prepend_think and not leaves_thought_open(opening):
        return text + config.opening, config.opening
    return text, opening


def _in_chat(messages: Sequence[tuple[str, str]], tokenizer: Any, config: PromptConfig) -> str:
    """The messages in the tokenizer's chat template."""
    template = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
    arguments = config.chat_template_kwargs
    if unknown := [name for name in arguments if name not in str(tokenizer.chat_template)]:
        raise UserError(f"prompt.chat_template_kwargs: {template} uses no {', '.join(unknown)}; leave it out")
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
            **{"date_string": config.date_string} | arguments,
        )
    except Exception as error:  # a template is a program, which raises what it likes
        roles = " and ".join(dict.fromkeys(role for role, _ in messages))
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{template} fails on messages of the role {roles}: {reason}; correct it, or choose"
            " prompt.chat=off or another prompt.template"
        ) from error
    for role, content in messages:
        if role in ("system", "user") and content.strip() not in str(text):
            raise UserError(
                f"{template} drops the message of the role {role}; correct it, or choose prompt.chat=off or"
                " another prompt.template"
            )
    return str(text)


def _opening(text: str, message: str = "", controls: Sequence[str] = ()) -> str:
    """The end of a prompt that begins the first turn: <think> and what follows it, or "".

    It may be any text behind the last control token that a chat template adds. Elsewhere, where a text may
    explain the tag, it is the tag or an empty thought at the very end.

    Args:
        message: the last one of a chat.
        controls: control tokens that are no tags.
    """
    end = text[-ENDING:]
    if OPEN_THINK not in end:
        return ""
    tail = text.rpartition(message)[2][-ENDING:] if message else ""
    start = max((tail.rfind(token) + len(token) for token in controls if token in tail), default=0)
    match = _THOUGHT.search(tail, start) if start else _ENDS_IN_THOUGHT.search(end)
    return match[0] if match else ""


def _carried(question: Question, extra: Collection[str], grammar: Grammar) -> list[tuple[str, str]]:
    """(role, content) of the messages that the question's row carries, neutralised."""
    if not question.prompt:
        raise UserError(
            f"question {question.id!r}: prompt.template is {FROM_DATA!r}, but its row has no 'prompt'; choose"
            " another template"
        )
    asked = neutralise(question.text, extra, grammar)
    return [
        (message.role, asked.join(_neutralise_but_tags(part, extra, grammar) for part in message.parts))
        for message in question.prompt
    ]


def _neutralise_but_tags(text: str, extra: Collection[str], grammar: Grammar) -> str:
    """`neutralise` for text that explains the protocol: tags written exactly stay."""
    others = [token for token in extra if token not in grammar.tags]
    pieces = split_at_tags(text, grammar)
    pieces[::2] = [neutralise(piece, others, grammar) for piece in pieces[::2]]
    kept = "".join(pieces)
    # A control token that contains a tag is in no single piece.
    is_divided = any(token in kept for token in others if token.strip())
    return neutralise(text, extra, grammar) if is_divided else kept
