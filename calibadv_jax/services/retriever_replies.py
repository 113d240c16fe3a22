"""Replies of a retrieval service: documents, pages and health.

The contract is Search-R1's, or that of the CalibAdv authors where documents are reranked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

import aiohttp
from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import AWAY, BadReply, HttpReply, Unreachable, excerpt, request

TOKEN_VARIABLE = "RETRIEVER_TOKEN"  # the service's own; a config would be written to the run folder
SAME = ("corpus_sha256", "encoder", "model", "reranker", "pages_sha256")  # of services that answer alike
IDENTITY = "identity"  # of this project's services: index, reranker and pages in one string
IDENTITY_HEADER = "X-Index-Identity"  # the same string, on every reply of POST /retrieve and POST /access

T = TypeVar("T")
_REFUSALS = (400, 413, 422)  # of the query; asking again changes nothing
_WRONG_ADDRESS = (403, 404, 405)


class Away(Unreachable):
    """The service says itself that it cannot answer now."""


class Broken(Away):
    """The service says that it failed over a request: because of its queries, or it fails over all."""


class _Passage(BaseModel):
    id: str | int | None = None
    contents: str

    def to_document(self, score: float | None = None) -> Document:
        title, _, text = self.contents.partition("\n")
        title = title.strip().removeprefix('"').removesuffix('"')
        return Document(title if self.id is None else str(self.id), title, text, score)


_Score = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _ScoredPassage(BaseModel):
    document: _Passage
    score: _Score | None = None

    def to_document(self) -> Document:
        return self.document.to_document(self.score)


class _RankedText(BaseModel):
    """A document in the authors' contract. Without an id its text is its identity: passages share titles."""

    document: str
    id: str | int | None = None
    score: _Score | None = None

    def to_document(self) -> Document:
        name = self.document if self.id is None else self.id
        return _Passage(id=name, contents=self.document).to_document(self.score)


class _Body(BaseModel, Generic[T]):
    result: T


def read_documents(url: str, reply: HttpReply, num_queries: int, is_reranked: bool) -> list[list[Document]]:
    """Return the documents of each query, best first.

    Raises:
        Away: the service cannot answer now, perhaps as `Broken`.
        BadReply: the reply is no answer to `num_queries` queries.
        QueryRefused: the service refuses one of the queries.
        UserError: it asks for a token, or has no such route.
    """
    _check_status(url, reply, "set retriever.url to a retrieval service")
    results = _parse(reply, list[list[_RankedText]] if is_reranked else list[list[_ScoredPassage]])
    if len(results) != num_queries:
        raise BadReply(f"{len(results)} lists for {num_queries} queries")
    return [[item.to_document() for item in items] for items in results]


def read_page(url: str, reply: HttpReply, address: str) -> Document | None:
    """Return the page at an address, None where there is none; raises as `read_documents`."""
    _check_status(url, reply, "start the service with --pages_path, or leave access out of tools")
    (page,) = _parse(reply, tuple[_Passage | None])
    # Not the passage of the same name, which may have been shown before.
    return None if page is None else replace(page.to_document(), id=f"page {address}")


def _parse(reply: HttpReply, kind: Any) -> Any:
    try:
        return reply.parse(_Body[kind]).result
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BadReply(f"{place}: {first['msg']} in {excerpt(reply.body)}") from error


def _check_status(url: str, reply: HttpReply, no_such_route: str) -> None:
    if reply.status == 401:
        raise UserError(
            f"retriever {url}: asks for a token; set the environment variable {TOKEN_VARIABLE} to it"
        )
    if reply.status in _WRONG_ADDRESS:
        raise UserError(f"retriever {url}: {reply.excerpt}; {no_such_route}")
    if reply.status in _REFUSALS:
        raise QueryRefused(f"retriever {url}: {reply.excerpt}")
    if reply.is_away:
        raise (Away if reply.status in AWAY else Broken)(reply.excerpt, reply.retry_after)
    if reply.status != 200:
        raise BadReply(reply.excerpt)


async def ask_health(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the reply of ``GET /health``, empty without such a route; raise Unreachable if it is away."""
    try:
        reply = await request(http, "GET", f"{url}/health")
    except BadReply as error:
        raise Unreachable(str(error)) from error
    if reply.is_away:
        raise Unreachable(reply.excerpt)
    try:
        state = json.loads(well_formed_json(reply.body)) if reply.status == 200 else {}
    except (ValueError, RecursionError):  # too many brackets
        return {}
    return state if isinstance(state, dict) else {}


def difference(agreed: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return how a service's documents differ from the agreed ones; empty if nothing shows a difference."""
    names = [*SAME, IDENTITY] if IDENTITY in agreed and IDENTITY in state else SAME
    for name in names:
        if state.get(name) != agreed.get(name):
            return f"{name} {state.get(name)!r} instead of {agreed.get(name)!r}"
    return ""


def identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a service's state that decides its documents; may be empty."""
    return {name: state[name] for name in (*SAME, IDENTITY) if name in state}
