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
    # Data: the prompt of Search-R1 and CalibAdv, word for word, under which their policies were trained.
    "paper": (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
        " you get new information. After reasoning, if you find you lack some knowledge, you can call a"
        " search engine by <search> query </search> and it will return the top searched results between"
        " <information> and </information>. You can search as many times as your want. If you find no"
        " further external knowledge needed, you can directly provide the answer inside <answer> and"
        " </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
        " Question: {question}\n"
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
    asked = question.text
    if config.question_mark:
        asked = asked.strip().removesuffix("?") + "?"
    text = template_text(config.template).replace(
        "{question}", neutralise(asked, added_token_strings(tokenizer))
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
