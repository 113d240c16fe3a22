"""Observations: the neutralised reply after a turn, in text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import (
    CLOSE_INFORMATION,
    INVALID_ACTION,
    OPEN_INFORMATION,
    SEARCH_GRAMMAR,
    Grammar,
    neutralise,
    well_formed,
)
from calibadv_jax.core.trajectory import Document

_MARKUP = frozenset("<>[]{}|｜")
LETTERS = 16  # of a text that are looked at first, for each of the tokens that will be shown


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` with every token shown and no space removed."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def added_token_strings(tokenizer: Any) -> frozenset[str]:
    """Return the control tokens: strings that become a token of their own wherever they occur.

    Added tokens without markup (a word, a run of spaces) and special tokens of one character do not count.
    """
    special = {str(token) for token in tokenizer.all_special_tokens}
    added = {token for token in map(str, tokenizer.get_added_vocab()) if _MARKUP & set(token)}
    return frozenset(token for token in special | added if len(token) > 1)


def neutralise_documents(
    documents: Sequence[Document], tokenizer: Any, grammar: Grammar = SEARCH_GRAMMAR
) -> tuple[Document, ...]:
    """Return retrieved documents as they may be shown and kept."""
    extra = added_token_strings(tokenizer)

    def shown(document: Document) -> Document:
        title, text = (neutralise(part, extra, grammar) for part in (document.title, document.text))
        return replace(document, id=well_formed(document.id), title=title, text=text)

    return tuple(map(shown, documents))


def neutralise_reply(
    reply: Reply, action: Action, tokenizer: Any, grammar: Grammar, max_length: int
) -> Reply:
    """Return an action's reply as it may be shown and kept: cut at `max_length` tokens, and neutralised."""

    def cut(text: str) -> str:
        return cut_early(well_formed(text), tokenizer, max_length)

    documents = reply.documents
    if not action.keeps_documents_whole:
        documents = tuple(
            replace(document, title=cut(document.title), text=cut(document.text)) for document in documents
        )
    documents = neutralise_documents(documents, tokenizer, grammar)
    text = cut(reply.text)
    return Reply(documents, neutralise(text, added_token_strings(tokenizer), grammar) if text else "")


@dataclass(frozen=True)
class Observations:
    """Writes observations, tokenised on their own: int32 [M] ids and their text."""

    tokenizer: Any
    max_length: int  # tokens; a longer information block loses the end of its body, never its closing tag
    opening: str  # of the turn that follows, see `PromptConfig.opening`
    notice: str = INVALID_ACTION  # after an invalid turn

    def of(self, action: Action) -> Observations:
        """Apply the action's own limit, where that is smaller."""
        return replace(self, max_length=min(self.max_length, action.max_length or self.max_length))

    def information(self, body: str) -> tuple[np.ndarray, str]:
        """Return the information block of a neutralised body; raise UserError if not even the tags fit."""
        ending = CLOSE_INFORMATION + self.opening
        start = cut_early(OPEN_INFORMATION + body, self.tokenizer, self.max_length)
        ids = encode(self.tokenizer, start + ending)
        if len(ids) <= self.max_length:
            return np.asarray(ids, np.int32), start + ending
        closing = encode(self.tokenizer, ending)
        opening = encode(self.tokenizer, start)[: max(0, self.max_length - len(closing))]
        tags = len(encode(self.tokenizer, OPEN_INFORMATION))
        if tags > len(opening):
            fault = f"rollout.max_observation_length is {self.max_length}"
            raise UserError(f"{fault}, but the tags alone need {tags + len(closing)} tokens: raise it")
        return np.asarray([*opening, *closing], np.int32), decode(self.tokenizer, opening) + ending

    def invalid(self) -> tuple[np.ndarray, str]:
        """Return the notice after a turn that asks for nothing; it is never cut."""
        text = self.notice + self.opening
        return np.asarray(encode(self.tokenizer, text), np.int32), text


def cut_early(text: str, tokenizer: Any, max_length: int) -> str:
    """Drop the end of a long text that cannot change its first `max_length` tokens: twice as many stay."""
    length = LETTERS * max_length
    while length < len(text):
        if len(encode(tokenizer, text[:length])) >= 2 * max_length:
            return text[:length]
        length *= 2
    return text
