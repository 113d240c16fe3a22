"""Prompt templates, and the prompt of a question in tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.tags import Grammar, neutralise, split_at_tags
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
    """Token ids of a question's prompt, int32 [P].

    The question is untrusted: tags and special tokens in it are neutralised. So is a prompt of the data,
    which explains the protocol: it keeps the tags that it writes exactly, and nothing else.

    Args:
        actions: those that are on, which the template "paper" lists; none: search alone.

    Raises:
        UserError: longer than `max_length`; chat is "on" for a tokenizer without a chat template; the row has
            no prompt, or one that needs a chat template which is not there.
    """
    text = prompt_text(question, tokenizer, config, added_token_strings(tokenizer), actions)
    ids = encode(tokenizer, text)
    if len(ids) > max_length:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(ids)} tokens, but rollout.max_prompt_length is"
            f" {max_length}: raise it, or drop the question"
        )
    return np.asarray(ids, np.int32)


def prompt_text(
    question: Question,
    tokenizer: Any,
    config: PromptConfig,
    extra: Collection[str],
    actions: Sequence[Action] = (),
) -> str:
    """What `build_prompt` encodes.

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
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
            date_string=config.date_string,
        )
    elif len(messages) == 1:
        text = messages[0][1]
    else:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(messages)} messages, which need a chat template:"
            " choose a tokenizer that has one and prompt.chat=auto, or another prompt.template"
        )
    return str(text) + config.opening


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
