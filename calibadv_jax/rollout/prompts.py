"""Prompt templates, and the prompt of a question in tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig
from calibadv_jax.errors import UserError
from calibadv_jax.protocol import OPEN_THINK, neutralise
from calibadv_jax.rollout.observation import added_token_strings, encode
from calibadv_jax.trajectory import Question

TEMPLATES = {
    # The protocol of Search-R1 and CalibAdv in our own words; it shows two answers, as theirs does.
    "paper": (
        "You answer questions with the help of a search engine. Every time you receive something new,"
        " reason about it first, between <think> and </think>. When you find that you lack some"
        " knowledge, write a query as <search> query </search>; the best passages come back between"
        " <information> and </information>. Search as often as you need. As soon as you need nothing"
        " more, write the answer, short and without explanation, between <answer> and </answer>, for"
        " example <answer> Beijing </answer>. Question: {question}\n"
    ),
    "short": "Question: {question}\n",
}


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
        f"prompt.template is {name!r}: neither one of {', '.join(TEMPLATES)}"
        " nor a text that contains {question}"
    )


def build_prompt(question: Question, tokenizer: Any, config: PromptConfig, max_length: int) -> np.ndarray:
    """Token ids of a question's prompt, int32 [P].

    The question is untrusted: tags and special tokens in it are neutralised.

    Raises:
        UserError: longer than `max_length`, or chat is "on" for a tokenizer without a chat template.
    """
    text = template_text(config.template).replace(
        "{question}", neutralise(question.text, added_token_strings(tokenizer))
    )
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat == "on" and not has_template:
        raise UserError("prompt.chat is 'on', but the tokenizer has no chat template; use 'auto' or 'off'")
    if has_template and config.chat != "off":
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            date_string=config.date_string,
        )
    ids = encode(tokenizer, text + (OPEN_THINK if config.prepend_think else ""))
    if len(ids) > max_length:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(ids)} tokens, but rollout.max_prompt_length is"
            f" {max_length}: raise it, or drop the question"
        )
    return np.asarray(ids, np.int32)
