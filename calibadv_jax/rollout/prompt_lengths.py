"""Which prompts are too long, known for all questions before the first one is asked."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.trajectory import Question
from calibadv_jax.rollout.observation import added_token_strings
from calibadv_jax.rollout.prompts import write_prompt

BATCH = 1024  # prompts that are tokenised together, on all cores


def prompt_lengths(
    questions: Sequence[Question],
    tokenizer: Any,
    config: PromptConfig,
    max_length: int,
    actions: Sequence[Action] = (),
) -> dict[int, int]:
    """Tokens of the prompts that are longer than `max_length`, by the question's place.

    Nearly all are known to be short enough by their letters; only the others are tokenised. So 100,000
    questions take seconds.

    Raises:
        UserError: a prompt cannot be written; see `build_prompt`.
    """
    extra = added_token_strings(tokenizer)
    lengths: dict[int, int] = {}
    pending: list[tuple[int, str]] = []

    def measure() -> None:
        if pending:
            places, texts = zip(*pending, strict=True)
            ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            found = zip(places, map(len, ids), strict=True)
            lengths.update((place, length) for place, length in found if length > max_length)
            pending.clear()

    for place, question in enumerate(questions):
        text, _ = write_prompt(question, tokenizer, config, extra, actions)
        if most_tokens(text) > max_length:
            pending.append((place, text))
        if len(pending) == BATCH:
            measure()
    measure()
    return lengths


def most_tokens(text: str) -> int:
    """A bound on the tokens of any tokenizer.

    None writes more than one a byte of the text in its longest form of Unicode; some put a space before every
    piece, which may double them.
    """
    return 2 * len(text if text.isascii() else unicodedata.normalize("NFKD", text).encode())


def drop_overlong(
    questions: Sequence[Question], lengths: dict[int, int], max_length: int, rule: str, name: str
) -> tuple[list[Question], str]:
    """The questions whose prompts fit, and in words how many do not; "" where all fit.

    Args:
        lengths: from `prompt_lengths`.
        rule: data.overlong_prompts.
        name: of the questions, for messages, such as data.train.

    Raises:
        UserError: some do not fit and the rule is "refuse", or none fits.
    """
    kept = [question for place, question in enumerate(questions) if place not in lengths]
    if not lengths:
        return kept, ""
    worst = max(lengths, key=lambda place: lengths[place])
    found = (
        f"{name}: the prompts of {len(lengths)} of {len(questions)} questions are longer than"
        f" rollout.max_prompt_length={max_length}, the longest has {lengths[worst]} tokens (question"
        f" {questions[worst].id!r})"
    )
    if rule == "refuse":
        raise UserError(f"{found}: raise it, or leave them out with data.overlong_prompts=leave_out")
    if not kept:
        raise UserError(f"{found}: none is left; raise it")
    return kept, f"{found}: they are left out"
