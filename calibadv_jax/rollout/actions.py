"""Actions of the retriever, the guard around a user's own action, and action names in prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import (
    ANSWER_USAGE,
    INVALID_TEMPLATE,
    NOTHING_FOUND,
    SEARCH_GRAMMAR,
    USAGE,
    Grammar,
)
from calibadv_jax.core.tool_calls import ToolSchema
from calibadv_jax.core.trajectory import Document
from calibadv_jax.core.user_functions import describe_failure


@dataclass(frozen=True)
class RetrieverAction(Action):
    """An action that asks the retriever."""

    max_length: int = 0  # tokens of an observation; 0: rollout.max_observation_length
    retriever: Any = None  # a client as `interfaces.Retriever`, which the agent loop sets


class SearchAction(RetrieverAction):
    """Documents for a query, best first."""

    name = "search"
    purpose = "search"
    argument = "query"
    description = "Search for passages; they come best first. A short query of a few words works best."
    keeps_documents_whole = True

    async def call(self, argument: str) -> Reply:
        """Return the documents of a query.

        Args:
            argument: the query.

        Returns:
            The documents, best first; no document if the retriever found none. The text is empty.

        Raises:
            QueryRefused: if the retriever refuses the query.
            RequestFailed: if the retriever gives no reply.
            UserError: if the retriever cannot answer any query.
        """
        (documents,) = await self.retriever.search([argument])
        return Reply(tuple(documents))

    def render(self, reply: Reply) -> str:
        """Return the numbered documents, or a sentence that says that there are none.

        Args:
            reply: the result of `call`, neutralised.

        Returns:
            The text between an observation's tags. It is never empty.
        """
        return super().render(reply) or NOTHING_FOUND


class AccessAction(RetrieverAction):
    """A page of the retriever, by its address."""

    name = "access"
    purpose = "read a whole page"
    argument = "address of the page"
    description = "Read a whole page."

    def schema(self) -> ToolSchema:
        """Return the action as a tool, whose argument is named url."""
        properties = {"url": {"type": "string", "description": self.argument}}
        parameters = {"type": "object", "properties": properties, "required": ["url"]}
        return ToolSchema(self.name, self.description, parameters)

    def parse_arguments(self, arguments: dict[str, Any]) -> str:
        """Return the address in the arguments of a tool call."""
        return str(arguments["url"]).strip()

    async def call(self, argument: str) -> Reply:
        """Return the page at an address.

        Args:
            argument: the address.

        Returns:
            A reply whose only document is the page.

        Raises:
            ActionRefused: if there is no such page.
            RequestFailed: if the retriever gives no reply.
            UserError: if the retriever cannot answer any request.
        """
        (page,) = await self.retriever.access([argument])
        if page is None:
            raise ActionRefused("there is no page with this address")
        return Reply((page,))


class GuardedAction(Action):
    """A guard around a user's own action: its errors, and calls that take too long, fail the trajectory only.

    Args:
        inner: the user's action.
        time_limit: seconds that one call may take.
        max_length: tokens of an observation; 0: the limit of the user's action.
    """

    def __init__(self, inner: Action, time_limit: float, max_length: int = 0):
        self._inner = inner
        self._time_limit = time_limit
        self.name = inner.name
        self.purpose = inner.purpose
        self.argument = inner.argument
        self.description = inner.description
        self.parameters = inner.parameters
        self.may_be_empty = inner.may_be_empty
        self.max_length = max_length or inner.max_length

    def parse(self, body: str) -> Any:
        """Return the argument of `call`, as the user's action parses it.

        Args:
            body: text between the action's tags, stripped.

        Returns:
            Whatever the user's action returns.

        Raises:
            ValueError: if the user's action refuses the body.
            UserError: if the user's action raises it.
            RequestFailed: if the user's action fails in another way.
        """
        with self._guarded(ValueError, UserError):
            return self._inner.parse(body)

    def parse_arguments(self, arguments: dict[str, Any]) -> Any:
        """Return the argument of `call`, as the user's action takes it from a tool call.

        Args:
            arguments: arguments of the call, which fit `schema`.

        Returns:
            Whatever the user's action returns.

        Raises:
            ValueError: if the user's action refuses the arguments.
            UserError: if the user's action raises it.
            RequestFailed: if the user's action fails in another way.
        """
        with self._guarded(ValueError, UserError):
            return self._inner.parse_arguments(arguments)

    def schema(self) -> ToolSchema:
        """Return the user's action as a tool of a chat template."""
        with self._guarded(UserError):
            return self._inner.schema()

    async def call(self, argument: Any) -> Reply:
        """Execute the user's action, and check what it returns.

        Args:
            argument: the result of `parse`.

        Returns:
            The reply. If the user's action returns a text or a list of documents, this is a reply with that
            text or those documents.

        Raises:
            ActionRefused: if the user's action refuses the argument.
            UserError: if the user's action raises it, or returns something else than a reply.
            RequestFailed: if the user's action fails in another way, or takes longer than the time limit.
        """
        limit = asyncio.timeout(self._time_limit)
        with self._guarded(ActionRefused, UserError, limit=limit):
            async with limit:
                reply = await self._inner.call(argument)
        return self._checked(reply)

    def render(self, reply: Reply) -> str:
        """Return the text between an observation's tags, as the user's action renders the reply.

        Args:
            reply: the result of `call`, neutralised.

        Returns:
            The text, which is not neutralised again; it may be empty.

        Raises:
            UserError: if the result is not a text.
            RequestFailed: if the user's action fails.
        """
        with self._guarded():
            text = self._inner.render(reply)
        if not isinstance(text, str):
            raise UserError(
                f"action {self.name}: render returned {type(text).__name__}; it must return a text"
            )
        return text

    async def close(self) -> None:
        """Close the user's action.

        Raises:
            UserError: if that fails.
        """
        try:
            await self._inner.close()
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"action {self.name}: close failed: {describe_failure(error)}; correct it"
            ) from error

    @contextmanager
    def _guarded(self, *passed: type[Exception], limit: asyncio.Timeout | None = None) -> Iterator[None]:
        """Raise RequestFailed for every error of the user's code but those of the types `passed`."""
        try:
            yield
        except passed:
            raise
        except Exception as error:  # the user's code may raise anything
            reason = describe_failure(error)
            if limit is not None and limit.expired():
                reason = f"no reply within {self._time_limit:g} s"
            raise RequestFailed(self.name, f"action {self.name}: {reason}") from error

    def _checked(self, returned: Any) -> Reply:
        """Return what `call` returned as a reply; raise UserError if that is impossible."""
        if isinstance(returned, str):
            return Reply(text=returned)
        reply = Reply(tuple(returned)) if isinstance(returned, Sequence) else returned
        if not _is_valid_reply(reply):
            raise UserError(
                f"action {self.name}: call returned {type(returned).__name__}; it must return a text, a list"
                " of Documents or a Reply, whose ids, titles and texts are texts and whose scores are finite"
            )
        return reply


def _is_valid_reply(reply: Any) -> bool:
    if not isinstance(reply, Reply) or not isinstance(reply.documents, Sequence):
        return False
    return all(_is_valid_document(document) for document in reply.documents) and isinstance(reply.text, str)


def _is_valid_document(document: Any) -> bool:
    if not isinstance(document, Document):
        return False
    has_texts = all(isinstance(text, str) for text in (document.id, document.title, document.text))
    return has_texts and _is_valid_score(document.score)


def _is_valid_score(score: Any) -> bool:
    if score is None:
        return True
    return isinstance(score, int | float) and math.isfinite(score)


def grammar_of(actions: Sequence[Action]) -> Grammar:
    """Return the tags of these actions.

    Args:
        actions: the actions that are on; none stand for search alone.

    Returns:
        The grammar, with the actions in the order given.
    """
    if not actions:
        return SEARCH_GRAMMAR
    may_be_empty = frozenset(action.name for action in actions if action.may_be_empty)
    return Grammar(tuple(action.name for action in actions), may_be_empty)


def action_texts(actions: Sequence[Action], neutraliser: Neutraliser | None = None) -> list[dict[str, str]]:
    """Return the name, purpose and argument of each action.

    Purpose and argument are neutralised, since a server may have written them.

    Args:
        actions: the actions that are on; none stand for search alone.
        neutraliser: removes forgeries. None: one for the tags of these actions alone.

    Returns:
        For each action its texts by "name", "purpose" and "argument".
    """
    if neutraliser is None:
        neutraliser = Neutraliser(grammar_of(actions))
    texts = []
    for action in actions or (SearchAction(),):
        texts.append(
            {
                "name": action.name,
                "purpose": neutraliser.neutralise(action.purpose),
                "argument": neutraliser.neutralise(action.argument),
            }
        )
    return texts


def invalid_notice(actions: Sequence[Action], neutraliser: Neutraliser | None = None) -> str:
    """Return the notice after an invalid turn, which says how each action is called.

    Args:
        actions: the actions that are on; none stand for search alone.
        neutraliser: removes forgeries. None: one for the tags of these actions alone.

    Returns:
        The notice: a sentence for each action and one for the answer. The actions' own texts are neutralised.
    """
    sentences = [USAGE.format(**usage) for usage in action_texts(actions, neutraliser)]
    return INVALID_TEMPLATE.format(usages="".join(sentences) + ANSWER_USAGE)
