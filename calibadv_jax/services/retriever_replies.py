"""What a retrieval service answers, in Search-R1's contract or in that of the CalibAdv authors."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import AWAY, BadReply, Reply, Unreachable

TOKEN_VARIABLE = "RETRIEVER_TOKEN"  # the service's own; a config would be written to the run folder

_REFUSALS = (400, 413, 422)  # of the query; asking again changes nothing
_WRONG_ADDRESS = (403, 404, 405)


class Away(Unreachable):
    """The service says itself that it cannot answer now."""


class Broken(Away):
    """The service says that it failed over a request: because of its queries, or it fails over all."""


class _Row(BaseModel):
    id: str | int | None = None
    contents: str


_Score = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Item(BaseModel):
    """Of Search-R1's contract."""

    document: _Row
    score: _Score | None = None

    def to_document(self) -> Document:
        row = self.document
        title, _, text = row.contents.partition("\n")
        title = title.strip().removeprefix('"').removesuffix('"')
        name = title if row.id is None else str(row.id)
        return Document(name, title, text, self.score)


class _RankedItem(BaseModel):
    """Of the CalibAdv authors' contract; this project's service adds the row's id.

    From another one the text is the identity, as it is in the authors' code: passages share titles.
    """

    document: str
    id: str | int | None = None
    score: _Score | None = None

    def to_document(self) -> Document:
        name = self.document if self.id is None else self.id
        row = _Row(id=name, contents=self.document)
        return _Item(document=row, score=self.score).to_document()


class _PageRow(BaseModel):
    contents: str

    def to_document(self, address: str) -> Document:
        """The page; not the passage of the same name, which may have been shown before."""
        return replace(_Item(document=_Row(contents=self.contents)).to_document(), id=f"page {address}")


class _Pages(BaseModel):
    """A reply to ``POST /access``."""

    result: list[_PageRow | None] = Field(min_length=1, max_length=1)


class _Results(BaseModel):
    """A reply in Search-R1's contract."""

    result: list[list[_Item]]


class _RankedResults(BaseModel):
    """A reply in the authors' contract."""

    result: list[list[_RankedItem]]


def read_documents(url: str, reply: Reply, num_queries: int, is_reranked: bool) -> list[list[Document]]:
    """The documents of each query, best first.

    Args:
        url: of the service, for messages.
        is_reranked: the service was asked in the CalibAdv authors' contract, else in Search-R1's.

    Raises:
        Away: the service says so, perhaps as `Broken`.
        BadReply: it is no answer to so many queries.
        QueryRefused: the service does not take one of the queries.
        UserError: it asks for a token, or has no such route.
    """
    _check_status(url, reply, "set retriever.url to a retrieval service")
    kind: type[_Results | _RankedResults] = _RankedResults if is_reranked else _Results
    try:
        lists = reply.parse(kind).result
    except ValidationError as error:
        raise _bad_reply(error, reply) from error
    if len(lists) != num_queries:
        raise BadReply(f"{len(lists)} lists for {num_queries} queries")
    return [[item.to_document() for item in one] for one in lists]


def read_page(url: str, reply: Reply, address: str) -> Document | None:
    """The one page that was asked for; None where there is none.

    Args:
        url: of the service, for messages.

    Raises:
        As `read_documents`.
    """
    _check_status(url, reply, "start the service with --pages_path, or leave access out of tools")
    try:
        (page,) = reply.parse(_Pages).result
    except ValidationError as error:
        raise _bad_reply(error, reply) from error
    return None if page is None else page.to_document(address)


def _bad_reply(error: ValidationError, reply: Reply) -> BadReply:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return BadReply(f"{place}: {first['msg']} in {excerpt(reply.body)}")


def _check_status(url: str, reply: Reply, no_such_route: str) -> None:
    """Raises what `read_documents` says, unless the reply's status is 200."""
    said = f"status {reply.status}: {excerpt(reply.body)}"
    if reply.status == 401:
        raise UserError(
            f"retriever {url}: asks for a token; set the environment variable {TOKEN_VARIABLE} to it"
        )
    if reply.status in _WRONG_ADDRESS:
        raise UserError(f"retriever {url}: {said}; {no_such_route}")
    if reply.status in _REFUSALS:
        raise QueryRefused(f"retriever {url}: {said}")
    if reply.is_away:
        raise (Away if reply.status in AWAY else Broken)(said, reply.retry_after)
    if reply.status != 200:
        raise BadReply(said)


def excerpt(reply: bytes) -> str:
    """Its beginning, on one line."""
    return repr(" ".join(reply.decode(errors="replace").split())[:120])
