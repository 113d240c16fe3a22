"""Actions of the retriever, the guard around a user's own action, and action names in prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import (
    ANSWER_USAGE,
    INVALID_TEMPLATE,
    NOTHING_FOUND,
    SEARCH_GRAMMAR,
    USAGE,
    Grammar,
    neutralise,
)
from calibadv_jax.core.trajectory import Document
from calibadv_jax.core.user_functions import failure


@dataclass(frozen=True)
class RetrieverAction(Action):
    max_length: int = 0
    retriever: Any = None


class SearchAction(RetrieverAction):
    """Documents for a query, best first."""

    name, purpose, argument = "search", "search", "query"
    keeps_documents_whole = True

    async def call(self, argument: str) -> Reply:
        (documents,) = await self.retriever.search([argument])
        return Reply(tuple(documents))

    def render(self, reply: Reply) -> str:
        return super().render(reply) or NOTHING_FOUND


class AccessAction(RetrieverAction):
    """A page of the retriever, by its address."""

    name, purpose, argument = "access", "read a whole page", "address of the page"

    async def call(self, argument: str) -> Reply:
        (page,) = await self.retriever.access([argument])
        if page is None:
            raise ActionRefused("there is no page with this address")
        return Reply((page,))


class OwnAction(Action):
    """A user's own action: its errors, and calls beyond `time_limit` seconds, fail the trajectory only."""

    def __init__(self, inner: Action, time_limit: float, max_length: int = 0):
        self._inner, self._time_limit = inner, time_limit
        self.name, self.purpose, self.argument = inner.name, inner.purpose, inner.argument
        self.may_be_empty, self.max_length = inner.may_be_empty, max_length or inner.max_length

    def parse(self, body: str) -> Any:
        with self._guarded(ValueError, UserError):
            return self._inner.parse(body)

    async def call(self, argument: Any) -> Reply:
        limit = asyncio.timeout(self._time_limit)
        with self._guarded(ActionRefused, UserError, limit=limit):
            async with limit:
                reply = await self._inner.call(argument)
        return self._checked(reply)

    def render(self, reply: Reply) -> str:
        with self._guarded():
            text = self._inner.render(reply)
        if not isinstance(text, str):
            fault = f"render returned {type(text).__name__}"
            raise UserError(f"action {self.name}: {fault}; it must return a text")
        return text

    async def close(self) -> None:
        try:
            await self._inner.close()
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"action {self.name}: close failed: {failure(error)}; correct it") from error

    @contextmanager
    def _guarded(self, *passed: type[Exception], limit: asyncio.Timeout | None = None) -> Iterator[None]:
        try:
            yield
        except passed:
            raise
        except Exception as error:  # the user's code may raise anything
            reason = failure(error)
            if limit is not None and limit.expired():
                reason = f"no reply within {self._time_limit:g} s"
            raise RequestFailed(self.name, f"action {self.name}: {reason}") from error

    def _checked(self, reply: Any) -> Reply:
        returned = type(reply).__name__
        if isinstance(reply, str):
            return Reply(text=reply)
        if isinstance(reply, Sequence):
            reply = Reply(tuple(reply))
        is_reply = isinstance(reply, Reply) and isinstance(reply.documents, Sequence)
        if not (is_reply and all(map(_is_valid, reply.documents)) and isinstance(reply.text, str)):
            raise UserError(
                f"action {self.name}: call returned {returned}; it must return a text, a list of"
                " Documents or a Reply, whose ids, titles and texts are texts and whose scores are finite"
            )
        return reply


def _is_valid(document: Any) -> bool:
    if not isinstance(document, Document):
        return False
    score, texts = document.score, (document.id, document.title, document.text)
    is_number = score is None or (isinstance(score, int | float) and math.isfinite(score))
    return is_number and all(isinstance(text, str) for text in texts)


def grammar_of(actions: Sequence[Action]) -> Grammar:
    """Return the tags of these actions; without actions those of search alone."""
    if not actions:
        return SEARCH_GRAMMAR
    may_be_empty = frozenset(action.name for action in actions if action.may_be_empty)
    return Grammar(tuple(action.name for action in actions), may_be_empty)


def usages(actions: Sequence[Action], extra: Collection[str] = ()) -> list[dict[str, str]]:
    """Return each action's name, purpose and argument, neutralised as a server may have written them."""
    grammar = grammar_of(actions)
    return [
        {
            "name": action.name,
            "purpose": neutralise(action.purpose, extra, grammar),
            "argument": neutralise(action.argument, extra, grammar),
        }
        for action in actions or (SearchAction(),)
    ]


def invalid_notice(actions: Sequence[Action], extra: Collection[str] = ()) -> str:
    """Return the notice after an invalid turn; without actions that of search alone."""
    ways = "".join(USAGE.format(**usage) for usage in usages(actions, extra))
    return INVALID_TEMPLATE.format(usages=ways + ANSWER_USAGE)
