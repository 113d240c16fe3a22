"""The prompt of a question: its template, its tokens, and whether it is too long."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig
from calibadv_jax.config.sections.data import DEFAULT_TEMPLATE, FROM_DATA
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import OPEN_THINK, leaves_thought_open
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Question
from calibadv_jax.core.user_functions import describe_failure
from calibadv_jax.protocols.template_date import fix_date
from calibadv_jax.rollout.actions import action_texts
from calibadv_jax.rollout.observation import make_neutraliser

ACTIONS_PLACE = "{actions}"  # The place in a template at which the actions that are on are listed.
# The prompt of Search-R1 and CalibAdv, word for word: their policies were trained with it.
_PAPER = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time"
    " you get new information. {actions} If you find no"
    " further external knowledge needed, you can directly provide the answer inside <answer> and"
    " </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."
    " Question: {question}\n"
)
_SEARCH_ACTION = (
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query"
    " </search> and it will return the top searched results between <information> and </information>. You can"
    " search as many times as your want."
)
_OTHER_ACTION = (
    "You can {purpose} by <{name}> {argument} </{name}>, and you get what it brings between <information> and"
    " </information>."
)
TEMPLATES = {
    "paper": _PAPER.replace(ACTIONS_PLACE, _SEARCH_ACTION),
    "short": "Question: {question}\n",
}
# Sentences for {answer_format} in prompt.system, by the place of the answer.
ANSWER_FORMATS = {
    "whole": "Then reply with the answer alone, in a few words and without an explanation.",
    "tag": "Then reply with the answer, in a few words, between <answer> and </answer>.",
    "box": "Then reply with the answer, in a few words, in \\boxed{}.",
}
BATCH = 1024  # Prompts that are tokenized together, on all cores.
_ENDING_LENGTH = 256  # Characters at a prompt's end in which the beginning of the first turn is looked for.
_THOUGHT = re.compile("<think>.*", re.DOTALL)
_ENDS_IN_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")


def template_text(name: str) -> str:
    """Return the text of a template.

    Args:
        name: a key of TEMPLATES, or a text that contains {question}, which is returned.

    Returns:
        A text that contains {question}.

    Raises:
        UserError: if it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{question}" in name:
        return name
    raise UserError(
        f"prompt.template is {name!r}: neither one of {', '.join([*TEMPLATES, FROM_DATA])}"
        " nor a text that contains {question}"
    )


def list_actions(actions: Sequence[Action], neutraliser: Neutraliser | None = None) -> str:
    """Say how each action is called, in a sentence or two each.

    Args:
        actions: the actions that are on; none stand for search alone.
        neutraliser: removes forgeries. None: one for the tags of these actions alone.

    Returns:
        The sentences, separated by spaces. The actions' own texts are neutralised.
    """
    sentences = []
    for usage in action_texts(actions, neutraliser):
        template = _SEARCH_ACTION if usage["name"] == "search" else _OTHER_ACTION
        sentences.append(template.format(**usage))
    return " ".join(sentences).replace(ACTIONS_PLACE, "actions")


def open_prompt(
    question: Question,
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
    neutraliser: Neutraliser | None = None,
) -> tuple[np.ndarray, str]:
    """Return a question's prompt as tokens, and the text that begins the first turn.

    Tags and control tokens in the untrusted question are neutralised. A prompt that the data carries keeps
    the tags that it writes exactly.

    Args:
        question: the question.
        tokenizer: a tokenizer of transformers, with or without a chat template.
        config: the section `prompt`.
        max_length: tokens that the prompt may have.
        actions: the actions that are on; none stand for search alone.
        neutraliser: removes forgeries. None: one for the tokenizer and these actions.

    Returns:
        Token ids, int32 [P], and the end of the prompt that begins the first turn, such as "<think>", or "".

    Raises:
        UserError: if the prompt is too long, the row of the data has no prompt, or the chat template fails or
            is missing.
    """
    if neutraliser is None:
        neutraliser = make_neutraliser(tokenizer, actions)
    text, opening = write_prompt(question, tokenizer, config, neutraliser, actions)
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
    neutraliser: Neutraliser,
    actions: Sequence[Action] = (),
) -> tuple[str, str]:
    """Return a question's prompt as text, and the text that begins the first turn.

    Args:
        question: the question.
        tokenizer: a tokenizer of transformers, with or without a chat template.
        config: the section `prompt`.
        neutraliser: removes forgeries, see `observation.make_neutraliser`.
        actions: the actions that are on; none stand for search alone.

    Returns:
        The prompt, and the end of it that begins the first turn, such as "<think>", or "".

    Raises:
        UserError: if the row of the data has no prompt, or the chat template fails or is missing.
    """
    messages = _messages(question, config, neutraliser, actions)
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if config.chat == "on" and not has_template:
        raise UserError("prompt.chat is 'on', but the tokenizer has no chat template; use 'auto' or 'off'")
    if has_template and config.chat != "off":
        text = _in_chat(messages, tokenizer, config)
        tags = neutraliser.grammar.tags
        controls = [token for token in neutraliser.control_tokens if token not in tags]
        _, last_message = messages[-1]
        opening = _opening_in_chat(text, last_message.strip(), controls)
    elif config.chat_template_kwargs:
        raise UserError("prompt.chat_template_kwargs needs a chat template, and none is used: leave it out")
    elif len(messages) > 1:
        raise UserError(
            f"question {question.id!r}: its prompt has {len(messages)} messages, which need a chat template:"
            " choose a tokenizer that has one and prompt.chat=auto, or another prompt.template"
        )
    else:
        _, text = messages[0]
        opening = _opening_at_end(text)
    if config.prepend_think and not leaves_thought_open(opening):
        return text + config.opening, config.opening
    return text, opening


def _messages(
    question: Question, config: PromptConfig, neutraliser: Neutraliser, actions: Sequence[Action]
) -> list[tuple[str, str]]:
    """Return (role, content) of the prompt's messages, neutralised: those of the data, or of the template."""
    if config.template == FROM_DATA:
        return messages_of_data(question, neutraliser.neutralise, neutraliser.neutralise_but_tags)
    text = neutraliser.neutralise(shown_question(question, config))
    template = _PAPER if config.template == DEFAULT_TEMPLATE else template_text(config.template)
    # The template is split before anything is filled in: neither the question nor a server's text about its
    # tools may fill a place of the other.
    listed_actions = list_actions(actions, neutraliser)
    parts = [part.replace(ACTIONS_PLACE, listed_actions) for part in template.split("{question}")]
    return [("user", text.join(parts))]


def _in_chat(messages: Sequence[tuple[str, str]], tokenizer: Any, config: PromptConfig) -> str:
    """Return the messages in the tokenizer's chat template."""
    template = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
    unknown = [name for name in config.chat_template_kwargs if name not in str(tokenizer.chat_template)]
    if unknown:
        raise UserError(f"prompt.chat_template_kwargs: {template} uses no {', '.join(unknown)}; leave it out")
    try:
        dated_template, variables = fix_date(tokenizer.get_chat_template(), config.date_string)
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            chat_template=dated_template,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
            **config.chat_template_kwargs,
        )
    except Exception as error:  # a template is a program, which may raise anything
        roles = " and ".join(dict.fromkeys(role for role, _ in messages))
        raise UserError(
            f"{template} fails on messages of the role {roles}: {describe_failure(error)}; correct it, or"
            " choose prompt.chat=off or another prompt.template"
        ) from error
    for role, content in messages:
        if role in ("system", "user") and content.strip() not in str(text):
            raise UserError(
                f"{template} drops the message of the role {role}; correct it, or choose prompt.chat=off or"
                " another prompt.template"
            )
    return str(text)


def _opening_in_chat(text: str, message: str, controls: Sequence[str]) -> str:
    """Return the end of a chat's prompt that begins the first turn: <think> and what follows it, or "".

    Between the last message and the first turn, the chat template writes control tokens. Behind the last of
    them <think> begins the turn, whatever follows it. Without a control token there, the rule of
    `_opening_at_end` holds.

    Args:
        text: the prompt.
        message: the content of its last message.
        controls: the tokenizer's control tokens that are no tags.
    """
    if OPEN_THINK not in text[-_ENDING_LENGTH:]:
        return ""
    tail = ""  # what the template writes after the last message
    if message:
        tail = text.rpartition(message)[2][-_ENDING_LENGTH:]
    ends = [tail.rfind(token) + len(token) for token in controls if token in tail]
    start = max(ends, default=0)
    if not start:
        return _opening_at_end(text)
    match = _THOUGHT.search(tail, start)
    return match[0] if match else ""


def _opening_at_end(text: str) -> str:
    """Return <think>, or an empty thought, at the very end of a prompt, or "".

    Elsewhere a text may explain the tag.
    """
    match = _ENDS_IN_THOUGHT.search(text[-_ENDING_LENGTH:])
    return match[0] if match else ""


def shown_question(question: Question, config: PromptConfig) -> str:
    """Return the text of a question as the prompt shows it, with its question mark; it is not neutralised.

    Args:
        question: the question.
        config: the section `prompt`.
    """
    if config.question_mark:
        return question.text.strip().removesuffix("?") + "?"
    return question.text


def messages_of_data(
    question: Question, neutralise: Callable[[str], str], neutralise_prompt: Callable[[str], str]
) -> list[tuple[str, str]]:
    """Return (role, content) of the messages that the question's row carries, neutralised.

    Args:
        question: the question.
        neutralise: neutralises the text of the question.
        neutralise_prompt: neutralises the other text of the messages.

    Raises:
        UserError: if the row carries none.
    """
    if not question.prompt:
        raise UserError(
            f"question {question.id!r}: prompt.template is {FROM_DATA!r}, but its row has no 'prompt'; choose"
            " another template"
        )
    text = neutralise(question.text)
    messages = []
    for message in question.prompt:
        parts = [neutralise_prompt(part) for part in message.parts]
        messages.append((message.role, text.join(parts)))
    return messages


# --- Prompts that are too long ---


def prompt_lengths(
    questions: Sequence[Question],
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
) -> dict[int, int]:
    """Return the lengths of the prompts that are too long.

    Args:
        questions: the questions.
        tokenizer: a tokenizer of transformers.
        config: the section `prompt`.
        max_length: tokens that a prompt may have.
        actions: the actions that are on; none stand for search alone.

    Returns:
        Index of a question -> tokens of its prompt, for the prompts of more than `max_length` tokens.

    Raises:
        UserError: as `write_prompt`.
    """
    neutraliser = make_neutraliser(tokenizer, actions)

    def write(question: Question) -> tuple[str, str]:
        """Write the prompt of a question."""
        return write_prompt(question, tokenizer, config, neutraliser, actions)

    return lengths_above(questions, write, tokenizer, max_length)


def lengths_above(
    questions: Sequence[Question],
    write: Callable[[Question], tuple[str, str]],
    tokenizer: Any,
    max_length: int,
) -> dict[int, int]:
    """Return the lengths of the prompts that are too long.

    Args:
        questions: the questions.
        write: returns the prompt of a question as text, and something else.
        tokenizer: a tokenizer of transformers.
        max_length: tokens that a prompt may have.

    Returns:
        Index of a question -> tokens of its prompt, for the prompts of more than `max_length` tokens.
    """
    lengths: dict[int, int] = {}
    batch: dict[int, str] = {}  # index of a question -> its prompt, if that may be too long
    for index, question in enumerate(questions):
        text, _ = write(question)
        if max_num_tokens(text) > max_length:
            batch[index] = text
        if len(batch) == BATCH:
            lengths.update(_batch_lengths_above(batch, tokenizer, max_length))
            batch = {}
    if batch:
        lengths.update(_batch_lengths_above(batch, tokenizer, max_length))
    return lengths


def _batch_lengths_above(prompts: dict[int, str], tokenizer: Any, max_length: int) -> dict[int, int]:
    """Tokenize prompts together, and return the lengths above `max_length`, by the prompts' keys."""
    encoded = tokenizer(list(prompts.values()), add_special_tokens=False, verbose=False)
    lengths = {}
    for index, ids in zip(prompts, encoded["input_ids"], strict=True):
        if len(ids) > max_length:
            lengths[index] = len(ids)
    return lengths


def max_num_tokens(text: str) -> int:
    """Return an upper bound of a text's number of tokens, without tokenizing it.

    A text has at most one token for each byte of its longest Unicode form (NFKD), and twice as many if the
    tokenizer puts a space before each.

    Args:
        text: any text.

    Returns:
        The bound; 0 for an empty text.
    """
    if text.isascii():
        return 2 * len(text)
    return 2 * len(unicodedata.normalize("NFKD", text).encode())


def drop_overlong(
    questions: Sequence[Question],
    lengths: dict[int, int],
    max_length: int,
    rule: str,
    name: str,
    noun: str = "prompts",
    limit: str = "rollout.max_prompt_length",
) -> tuple[list[Question], str]:
    """Drop the questions whose prompts are too long.

    Args:
        questions: the questions.
        lengths: index of a question -> tokens of its prompt, from `prompt_lengths`.
        max_length: tokens that a prompt may have.
        rule: `data.overlong_prompts`: "leave_out" or "refuse".
        name: config key of the questions, for messages.
        noun: what is too long, for messages.
        limit: config key of `max_length`, for messages.

    Returns:
        The questions whose prompts fit, and a sentence about the others; "" if there are none.

    Raises:
        UserError: if a prompt does not fit and the rule is "refuse", or if no prompt fits.
    """
    if not lengths:
        return list(questions), ""
    fitting = [question for index, question in enumerate(questions) if index not in lengths]
    longest = max(lengths, key=lambda index: lengths[index])
    message = (
        f"{name}: the {noun} of {len(lengths)} of {len(questions)} questions are longer than"
        f" {limit}={max_length}, the longest has {lengths[longest]} tokens"
        f" (question {questions[longest].id!r})"
    )
    if rule == "refuse":
        raise UserError(f"{message}: raise it, or leave them out with data.overlong_prompts=leave_out")
    if not fitting:
        raise UserError(f"{message}: none is left; raise it")
    return fitting, f"{message}: they are left out"
