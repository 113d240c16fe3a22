"""The actions that come with the program, how one's own is kept to the rules, and how all are named."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply, Retriever
from calibadv_jax.core.own_function import failure
from calibadv_jax.core.tags import INVALID_ACTION, NOTHING_FOUND, SEARCH_GRAMMAR, Grammar, neutralise
from calibadv_jax.core.trajectory import Document


@dataclass(frozen=True)
class OfRetriever(Action):
    """An action of the retriever; `over` gives it the one that is open."""

    retriever: Retriever | None = None
    max_length: int = 0

    def over(self, retriever: Retriever) -> Action:
        return replace(self, retriever=retriever)

    @property
    def opened(self) -> Retriever:
        assert self.retriever is not None
        return self.retriever


class Search(OfRetriever):
    """Documents for a query, best first."""

    name, purpose, argument = "search", "search", "query"
    keeps_documents_whole = True

    async def call(self, argument: str) -> Reply:
        (found,) = await self.opened.search([argument])
        return Reply(tuple(found))

    def render(self, reply: Reply) -> str:
        return super().render(reply) or NOTHING_FOUND


class Access(OfRetriever):
    """One page of the retriever, by its address."""

    name, purpose, argument = "access", "read a whole page", "address of the page"

    async def call(self, argument: str) -> Reply:
        (page,) = await self.opened.access([argument])
        if page is None:
            raise ActionRefused("there is no page with this address")
        return Reply((page,))


class OwnAction(Action):
    """An action from outside this program: what goes wrong in it fails the trajectory, not the run.

    Args:
        inner: what is asked.
        time_limit: seconds of one call.
        max_length: tokens of an observation; 0: rollout.max_observation_length.
    """

    def __init__(self, inner: Action, time_limit: float, max_length: int = 0):
        self._inner, self._time_limit = inner, time_limit
        self.name, self.purpose, self.argument = inner.name, inner.purpose, inner.argument
        self.may_be_empty, self.max_length = inner.may_be_empty, max_length or inner.max_length

    def parse(self, body: str) -> Any:
        try:
            return self._inner.parse(body)
        except (ValueError, UserError):
            raise
        except Exception as error:  # a person's own code may raise anything
            raise self._failed(error) from error

    async def call(self, argument: Any) -> Reply:
        limit = asyncio.timeout(self._time_limit)
        try:
            async with limit:
                found = await self._inner.call(argument)
        except (ActionRefused, UserError):
            raise
        except Exception as error:  # a person's own code may raise anything
            if limit.expired():
                reason = f"no reply within {self._time_limit:g} s"
                raise RequestFailed(self.name, f"action {self.name}: {reason}") from error
            raise self._failed(error) from error
        return self._checked(found)

    def render(self, reply: Reply) -> str:
        try:
            shown = self._inner.render(reply)
        except Exception as error:  # a person's own code may raise anything
            raise self._failed(error) from error
        if not isinstance(shown, str):
            raise UserError(
                f"action {self.name}: render returned {type(shown).__name__}; it must return a text"
            )
        return shown

    async def close(self) -> None:
        try:
            await self._inner.close()
        except Exception as error:  # a person's own code may raise anything
            raise UserError(f"action {self.name}: close failed: {failure(error)}; correct it") from error

    def _failed(self, error: Exception) -> RequestFailed:
        return RequestFailed(self.name, f"action {self.name}: {failure(error)}")

    def _checked(self, found: Any) -> Reply:
        if isinstance(found, str):
            return Reply(text=found)
        if not isinstance(found, Reply):
            if not isinstance(found, Sequence) or not all(isinstance(one, Document) for one in found):
                raise UserError(
                    f"action {self.name}: call returned {type(found).__name__}; it must return a text, a list"
                    " of Documents or a Reply"
                )
            found = Reply(tuple(found))
        documents = found.documents
        listed = isinstance(documents, Sequence) and all(map(_is_whole, documents))
        if not listed or not isinstance(found.text, str):
            raise UserError(
                f"action {self.name}: call returned a Reply whose text, or whose Documents' id, title or"
                " text, are no texts, or a score that is no finite number; make texts of them"
            )
        return found


def _is_whole(document: Any) -> bool:
    """Whether what it holds can be shown and kept."""
    if not isinstance(document, Document):
        return False
    score, texts = document.score, (document.id, document.title, document.text)
    is_number = score is None or (isinstance(score, int | float) and math.isfinite(score))
    return is_number and all(isinstance(one, str) for one in texts)


def grammar_of(actions: Sequence[Action]) -> Grammar:
    """The tags of these actions; none stand for search alone."""
    if not actions:
        return SEARCH_GRAMMAR
    return Grammar(
        tuple(one.name for one in actions), frozenset(one.name for one in actions if one.may_be_empty)
    )


def usages(actions: Sequence[Action], extra: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Name, purpose and argument of each, as they may stand in a prompt: a server may have written them."""
    grammar = grammar_of(actions)
    return [
        (one.name, neutralise(one.purpose, extra, grammar), neutralise(one.argument, extra, grammar))
        for one in actions
    ]


def invalid_notice(actions: Sequence[Action], extra: Collection[str] = ()) -> str:
    """What the policy reads after a turn that does none of these; none stand for search alone."""
    if not actions:
        return INVALID_ACTION
    ways = " ".join(
        f"If I want to {purpose}, I should put the {argument} between <{name}> and </{name}>."
        for name, purpose, argument in usages(actions, extra)
    )
    beginning, _, _ = INVALID_ACTION.partition(" If I want")
    _, want, ending = INVALID_ACTION.rpartition(" If I want")
    return f"{beginning} {ways}{want}{ending}"
