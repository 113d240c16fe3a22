"""The prompt of a question: templates, tokens, and which prompts are too long."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.tags import OPEN_THINK, Grammar, leaves_thought_open, neutralise, split_at_tags
from calibadv_jax.core.trajectory import Question
from calibadv_jax.core.user_functions import failure
from calibadv_jax.rollout.actions import grammar_of, usages
from calibadv_jax.rollout.observation import added_token_strings, encode

ACTIONS = "{actions}"  # in a template: where the actions that are on are listed
# Of Search-R1 and CalibAdv, word for word: their policies were trained under this prompt.
_PAPER = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
    " you get new information. {actions} If you find no"
    " further external knowledge needed, you can directly provide the answer inside <answer> and"
    " </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
    " Question: {question}\n"
)
_SEARCH = (
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query"
    " </search> and it will return the top searched results between <information> and </information>. You can"
    " search as many times as your want."
)
_OTHER = (
    "You can {purpose} by <{name}> {argument} </{name}>, and you get what it brings between <information> and"
    " </information>."
)
TEMPLATES = {"paper": _PAPER.replace(ACTIONS, _SEARCH), "short": "Question: {question}\n"}
FROM_DATA = "from_data"
ENDING = 256  # characters at a prompt's end in which a turn may be opened
BATCH = 1024  # prompts that are tokenised together, on all cores
_THOUGHT = re.compile("<think>.*", re.DOTALL)
_ENDS_IN_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")


def template_text(name: str) -> str:
    """Return a built-in template, or `name` itself where it contains {question}; else raise UserError."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{question}" in name:
        return name
    raise UserError(
        f"prompt.template is {name!r}: neither one of {', '.join([*TEMPLATES, FROM_DATA])}"
        " nor a text that contains {question}"
    )


def list_actions(actions: Sequence[Action], extra: Collection[str] = ()) -> str:
    """Say how each action is called, a sentence or two each; none stand for search alone."""
    ways = (
        {"search": _SEARCH}.get(usage["name"], _OTHER).format(**usage) for usage in usages(actions, extra)
    )
    return " ".join(ways).replace(ACTIONS, "actions")


def open_prompt(
    question: Question, tokenizer: Any, config: PromptConfig, max_length: int, actions: Sequence[Action] = ()
) -> tuple[np.ndarray, str]:
    """Return the token ids of a question's prompt, int32 [P], and the text that begins the first turn.

    Tags and special tokens of the untrusted question are neutralised; a prompt of the data keeps the tags
    that it writes exactly. Raises UserError if it is longer than `max_length`, the row has no prompt, or the
    chat template fails or is missing.
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
    """Return the text of `open_prompt`, and its end that begins the first turn; `extra`: control tokens."""
    grammar = grammar_of(actions)
    if config.template == FROM_DATA:
        messages = _carried(question, extra, grammar)
    else:
        text = question.text
        if config.question_mark:
            text = text.strip().removesuffix("?") + "?"
        template = _PAPER if config.template == "paper" else template_text(config.template)
        # Split first: neither the question nor a server's text about its tools fills a place of the other.
        listed = list_actions(actions, extra)
        parts = [part.replace(ACTIONS, listed) for part in template.split("{question}")]
        messages = [("user", neutralise(text, extra, grammar).join(parts))]
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat == "on" and not has_template:
        raise UserError("prompt.chat is 'on', but the tokenizer has no chat template; use 'auto' or 'off'")
    if has_template and config.chat != "off":
        text = _in_chat(messages, tokenizer, config)
        controls = [token for token in extra if token not in grammar.tags]
        opening = _opening(text, messages[-1][1].strip(), controls)
    elif config.chat_template_kwargs:
        raise UserError("prompt.chat_template_kwargs needs a chat template, and none is used: leave it out")
    elif len(messages) > 1:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(messages)} messages, which need a chat template:"
            " choose a tokenizer that has one and prompt.chat=auto, or another prompt.template"
        )
    else:
        text = messages[0][1]
        opening = _opening(text)
    if config.prepend_think and not leaves_thought_open(opening):
        return text + config.opening, config.opening
    return text, opening


def _in_chat(messages: Sequence[tuple[str, str]], tokenizer: Any, config: PromptConfig) -> str:
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
        fault = f"{template} fails on messages of the role {roles}: {failure(error)}; correct it"
        raise UserError(f"{fault}, or choose prompt.chat=off or another prompt.template") from error
    for role, content in messages:
        if role in ("system", "user") and content.strip() not in str(text):
            fault = f"{template} drops the message of the role {role}"
            raise UserError(f"{fault}; correct it, or choose prompt.chat=off or another prompt.template")
    return str(text)


def _opening(text: str, message: str = "", controls: Sequence[str] = ()) -> str:
    """Return the end of a prompt that begins the first turn: <think> and what follows it, or "".

    Any text may follow the last of the `controls` (control tokens) that a chat template adds after the last
    `message`. Elsewhere, where a text may explain the tag, it is the tag or an empty thought at the very end.
    """
    end = text[-ENDING:]
    if OPEN_THINK not in end:
        return ""
    tail = text.rpartition(message)[2][-ENDING:] if message else ""
    start = max((tail.rfind(token) + len(token) for token in controls if token in tail), default=0)
    match = _THOUGHT.search(tail, start) if start else _ENDS_IN_THOUGHT.search(end)
    return match[0] if match else ""


def _carried(question: Question, extra: Collection[str], grammar: Grammar) -> list[tuple[str, str]]:
    """Return (role, content) of the messages that the question's row carries, neutralised."""
    if not question.prompt:
        fault = f"question {question.id!r}: prompt.template is {FROM_DATA!r}, but its row has no 'prompt'"
        raise UserError(f"{fault}; choose another template")
    text = neutralise(question.text, extra, grammar)
    return [
        (message.role, text.join(_neutralise_but_tags(part, extra, grammar) for part in message.parts))
        for message in question.prompt
    ]


def _neutralise_but_tags(text: str, extra: Collection[str], grammar: Grammar) -> str:
    """`neutralise` for text that explains the protocol: tags written exactly stay."""
    controls = [token for token in extra if token not in grammar.tags and token.strip()]
    pieces = split_at_tags(text, grammar)
    pieces[::2] = [neutralise(piece, controls, grammar) for piece in pieces[::2]]
    joined = "".join(pieces)
    # A control token that contains a tag is in no single piece.
    return neutralise(text, extra, grammar) if any(token in joined for token in controls) else joined


def prompt_lengths(
    questions: Sequence[Question],
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
) -> dict[int, int]:
    """Return the lengths of prompts over `max_length`, by the question's place; raises as `open_prompt`."""
    extra = added_token_strings(tokenizer)
    prompts = (write_prompt(question, tokenizer, config, extra, actions)[0] for question in questions)
    candidates = ((place, text) for place, text in enumerate(prompts) if most_tokens(text) > max_length)
    lengths: dict[int, int] = {}
    while batch := list(islice(candidates, BATCH)):
        places, texts = zip(*batch, strict=True)
        ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        counts = zip(places, map(len, ids), strict=True)
        lengths |= {place: count for place, count in counts if count > max_length}
    return lengths


def most_tokens(text: str) -> int:
    """Bound the tokens: one a byte in Unicode's longest form, twice as many if each has a space before it."""
    return 2 * len(text if text.isascii() else unicodedata.normalize("NFKD", text).encode())


def drop_overlong(
    questions: Sequence[Question],
    lengths: dict[int, int],
    max_length: int,
    rule: str,
    name: str,
    noun: str = "prompts",
    limit: str = "rollout.max_prompt_length",
) -> tuple[list[Question], str]:
    """Return the questions whose prompts fit, and in words how many do not; "" where all fit.

    `lengths` come from `prompt_lengths`; `name` and `limit` are config keys, of the questions and of the
    maximum. Raises UserError if some do not fit and the `rule` is "refuse", or if none fits.
    """
    if not lengths:
        return list(questions), ""
    fitting = [question for place, question in enumerate(questions) if place not in lengths]
    worst = max(lengths, key=lambda place: lengths[place])
    message = (
        f"{name}: the {noun} of {len(lengths)} of {len(questions)} questions are longer than"
        f" {limit}={max_length}, the longest has {lengths[worst]} tokens (question {questions[worst].id!r})"
    )
    if rule == "refuse":
        raise UserError(f"{message}: raise it, or leave them out with data.overlong_prompts=leave_out")
    if not fitting:
        raise UserError(f"{message}: none is left; raise it")
    return fitting, f"{message}: they are left out"
