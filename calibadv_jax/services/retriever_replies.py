"""Replies of a retrieval service, in both contracts: Search-R1's, and that of the CalibAdv authors.

The authors' contract is used where documents are reranked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import UNAVAILABLE_STATUSES, BadReply, HttpReply, Unreachable, excerpt

# Environment variable of the service's bearer token. It is no config key, because a config is written to the
# run folder.
TOKEN_VARIABLE = "RETRIEVER_TOKEN"

T = TypeVar("T")


class Unavailable(Unreachable):
    """The service says that it cannot answer now."""


class ServerError(Unavailable):
    """The service failed over a request: because of its queries, or because it fails over all requests."""


class _Passage(BaseModel):
    id: str | int | None = None
    contents: str  # title, newline, text

    def to_document(self, score: float | None = None) -> Document:
        title, _, text = self.contents.partition("\n")
        title = title.strip().removeprefix('"').removesuffix('"')
        document_id = title if self.id is None else str(self.id)
        return Document(document_id, title, text, score)


_Score = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _ScoredPassage(BaseModel):
    """A document in Search-R1's contract."""

    document: _Passage
    score: _Score | None = None

    def to_document(self) -> Document:
        return self.document.to_document(self.score)


class _RankedText(BaseModel):
    """A document in the authors' contract. Without an id its text identifies it: passages share titles."""

    document: str
    id: str | int | None = None
    score: _Score | None = None

    def to_document(self) -> Document:
        document_id = self.document if self.id is None else self.id
        return _Passage(id=document_id, contents=self.document).to_document(self.score)


class _Body(BaseModel, Generic[T]):
    result: T


def read_documents(url: str, reply: HttpReply, num_queries: int, is_reranked: bool) -> list[list[Document]]:
    """Return the documents of each query, best first.

    Args:
        url: Address of the service, for messages.
        reply: Reply of ``POST /retrieve``.
        num_queries: Number of queries in the request.
        is_reranked: Whether the reply follows the authors' contract.

    Raises:
        Unavailable: The service cannot answer now; ServerError if it may be because of the queries.
        BadReply: The reply does not answer `num_queries` queries.
        QueryRefused: The service refuses one of the queries.
        UserError: The service asks for a token, or has no such route.
    """
    _check_status(url, reply, "set retriever.url to a retrieval service")
    kind = list[list[_RankedText]] if is_reranked else list[list[_ScoredPassage]]
    results = _parse(reply, kind)
    if len(results) != num_queries:
        raise BadReply(f"{len(results)} lists for {num_queries} queries")
    return [[passage.to_document() for passage in passages] for passages in results]


def read_page(url: str, reply: HttpReply, address: str) -> Document | None:
    """Return the page at an address, None if there is none.

    Args:
        url: Address of the service, for messages.
        reply: Reply of ``POST /access``.
        address: Address of the page, as the policy gave it.

    Raises the errors of `read_documents`.
    """
    _check_status(url, reply, "start the service with --pages_path, or leave access out of tools")
    (page,) = _parse(reply, tuple[_Passage | None])
    if page is None:
        return None
    # The id differs from that of the passage with the same title, which the policy may have seen before.
    return replace(page.to_document(), id=f"page {address}")


def _parse(reply: HttpReply, kind: Any) -> Any:
    """Return the "result" of a reply, of the type `kind`; raise BadReply if it is of another type."""
    try:
        return reply.parse(_Body[kind]).result
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise BadReply(f"{place}: {first['msg']} in {excerpt(reply.body)}") from error


def _check_status(url: str, reply: HttpReply, no_such_route: str) -> None:
    """Raise the error of `read_documents` for a status other than 200; `no_such_route` is advice."""
    if reply.status == 401:
        raise UserError(
            f"retriever {url}: asks for a token; set the environment variable {TOKEN_VARIABLE} to it"
        )
    if reply.status in (403, 404, 405):
        raise UserError(f"retriever {url}: {reply.excerpt}; {no_such_route}")
    if reply.status in (400, 413, 422):  # because of the query: another attempt changes nothing
        raise QueryRefused(f"retriever {url}: {reply.excerpt}")
    if reply.status in UNAVAILABLE_STATUSES:
        raise Unavailable(reply.excerpt, reply.retry_after)
    if reply.is_unavailable:
        raise ServerError(reply.excerpt, reply.retry_after)
    if reply.status != 200:
        raise BadReply(reply.excerpt)
