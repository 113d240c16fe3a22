"""Observations: what the environment writes after a turn, neutralised, as text and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import (
    CLOSE_INFORMATION,
    INVALID_ACTION,
    OPEN_INFORMATION,
    well_formed,
)
from calibadv_jax.core.tokens import added_token_strings, decode, encode, normaliser_of
from calibadv_jax.rollout.actions import grammar_of

# Characters that `cut_early` tokenizes first, for each token that may be shown.
CHARACTERS_PER_TOKEN = 16


def make_neutraliser(
    tokenizer: Any, actions: Sequence[Action] = (), markers: tuple[str, ...] = ()
) -> Neutraliser:
    """Return the neutraliser of untrusted text for a tokenizer and these actions.

    Args:
        tokenizer: a tokenizer of transformers.
        actions: the actions that are on; none stand for search alone.
        markers: texts of a tool-call format that untrusted text must not hold.

    Returns:
        A neutraliser of the protocol's tags, those of these actions included, and of the tokenizer's control
        tokens. It compares text as the tokenizer normalises it.
    """
    return Neutraliser(grammar_of(actions), added_token_strings(tokenizer), normaliser_of(tokenizer), markers)


def neutralise_reply(
    reply: Reply, action: Action, tokenizer: Any, neutraliser: Neutraliser, max_length: int
) -> Reply:
    """Return an action's reply cut and neutralised, so that it may be shown and kept.

    Args:
        reply: the reply of an action.
        action: the action; if it `keeps_documents_whole`, documents are not cut.
        tokenizer: a tokenizer of transformers, which counts tokens.
        neutraliser: removes forgeries from titles and texts.
        max_length: tokens that may be shown. Each text keeps at least as many, see `cut_early`.

    Returns:
        A new reply, with the documents in the same order.
    """

    def cut(text: str) -> str:
        """Drop the end of a long text."""
        return cut_early(well_formed(text), tokenizer, max_length)

    documents = reply.documents
    if not action.keeps_documents_whole:
        documents = tuple(
            replace(document, title=cut(document.title), text=cut(document.text)) for document in documents
        )
    return Reply(neutraliser.neutralise_documents(documents), neutraliser.neutralise(cut(reply.text)))


@dataclass(frozen=True)
class Observations:
    """Writes observations, which are tokenized on their own, apart from the turn before them."""

    tokenizer: Any
    max_length: int  # tokens; a longer information block loses the end of its body, never its closing tag
    opening: str  # beginning of the turn that follows, see `PromptConfig.opening`
    notice: str = INVALID_ACTION  # after an invalid turn

    def for_action(self, action: Action) -> Observations:
        """Return a writer for this action, which has the action's own limit if that is smaller.

        Args:
            action: the action; its `max_length` 0 means no limit of its own.

        Returns:
            A copy of this writer, whose `max_length` is the smaller of the two limits, in tokens.
        """
        limit = action.max_length or self.max_length
        return replace(self, max_length=min(self.max_length, limit))

    def information(self, body: str) -> tuple[np.ndarray, str]:
        """Return the information block with this body.

        Args:
            body: neutralised text.

        Returns:
            Token ids, int32 [M] with M at most `max_length`, and their text. If the body is too long, its end
            is cut.

        Raises:
            UserError: if not even the tags fit.
        """
        ending = CLOSE_INFORMATION + self.opening
        start = cut_early(OPEN_INFORMATION + body, self.tokenizer, self.max_length)
        ids = encode(self.tokenizer, start + ending)
        if len(ids) <= self.max_length:
            return np.asarray(ids, np.int32), start + ending
        closing = encode(self.tokenizer, ending)
        room = max(0, self.max_length - len(closing))
        kept = encode(self.tokenizer, start)[:room]
        num_opening = len(encode(self.tokenizer, OPEN_INFORMATION))
        if num_opening > len(kept):
            raise UserError(
                f"rollout.max_observation_length is {self.max_length}, but the tags alone need"
                f" {num_opening + len(closing)} tokens: raise it"
            )
        return np.asarray([*kept, *closing], np.int32), decode(self.tokenizer, kept) + ending

    def invalid(self) -> tuple[np.ndarray, str]:
        """Return the notice after an invalid turn; it is never cut.

        Returns:
            Token ids, int32 [M], and their text.
        """
        text = self.notice + self.opening
        return np.asarray(encode(self.tokenizer, text), np.int32), text


def cut_early(text: str, tokenizer: Any, max_length: int) -> str:
    """Drop the end of a long text, so that tokenizing the rest is fast.

    The first `max_length` tokens do not change, since at least twice as many stay.

    Args:
        text: a text of any length.
        tokenizer: counts tokens.
        max_length: tokens that may be shown.

    Returns:
        The beginning of the text, or the whole text if it is not long.
    """
    length = CHARACTERS_PER_TOKEN * max_length
    while length < len(text):
        if len(encode(tokenizer, text[:length])) >= 2 * max_length:
            return text[:length]
        length *= 2
    return text
