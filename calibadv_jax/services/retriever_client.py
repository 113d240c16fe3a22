"""Client of the retrieval service: one service, or several with equal answers.

Queries that come while a request is under way share the next one. A request that fails is divided until it
shows which of its queries fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import PAGE_ROUTE, SEARCH_ROUTE
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import (
    BAD_REPLIES,
    BadReply,
    HttpReply,
    PerLoop,
    Unreachable,
    Warn,
    describe_patience,
    open_session,
    retry,
    wait_for_any,
)
from calibadv_jax.services.replicas import Replicas
from calibadv_jax.services.retriever_health import ask_health, index_difference
from calibadv_jax.services.retriever_replies import (
    TOKEN_VARIABLE,
    ServerError,
    read_documents,
    read_page,
)

BATCH_WINDOW = 0.002  # seconds that a query waits for others to share its request
MAX_BATCH = 256  # queries in one request
PROBE = "test"  # a query that every service must accept
START_ADVICE = "start it with calibadv retriever"

QueryResult = list[Document] | RequestFailed  # documents of a query, or why it failed
T = TypeVar("T")


@dataclass
class _Batch:
    """Queries that share a request; `queries` grows until the request is sent."""

    queries: list[str]
    results: asyncio.Task[list[QueryResult]]


class RetrieverClient:
    """Implements `interfaces.Retriever` over ``POST /retrieve``, of the services at one or several URLs.

    While all services are unavailable a search waits, for `retriever.patience` seconds.

    Args:
        config: The section `retriever`.
        url: URL of the service, or of several.
        warn: Takes lines about waits and about services that are left out.

    Attributes:
        urls: URLs of the services.
        url: All URLs in one text, for messages.
        unreachable: Services that did not answer `health`, and why.
    """

    def __init__(self, config: RetrieverConfig, url: str | Sequence[str], warn: Warn = lambda _: None):
        self.config = config
        urls = [url] if isinstance(url, str) else url
        self.urls = [base.rstrip("/") for base in urls]
        self.url = ", ".join(self.urls)
        self.unreachable: dict[str, str] = {}
        self._warn = warn
        self._connections = PerLoop(self._connect)
        self._batch: _Batch | None = None  # the batch that takes further queries
        self._is_away = False  # whether the last request found no service
        self._has_answered = False  # whether any search was ever answered
        # Health of the agreed index: searches accept documents of this index only. None before `health`.
        self._agreed: dict[str, Any] | None = None

    def _connect(self) -> tuple[aiohttp.ClientSession, Replicas]:
        self._batch = None  # its task belongs to an earlier event loop
        http = open_session(self.config.timeout, TOKEN_VARIABLE)
        return http, Replicas(http, self.urls, self._agreed, self._warn)

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return the documents of each query, best first.

        Args:
            queries: Queries of one search; they are sent in one request.

        Raises:
            QueryRefused: The service refuses one of the queries.
            RequestFailed: The service was unavailable for `retriever.patience` seconds, or its replies are
                invalid.
            UserError: The service asks for a token, has no such route, refuses every query, or serves another
                index than at `health`.
        """
        self._connections.get()
        batch = self._open_batch(len(queries))
        start = len(batch.queries)
        batch.queries += queries
        # Shielded, because other searches wait for the same request. An error of its task is raised here.
        results = await asyncio.shield(batch.results)
        documents = []
        for result in results[start : start + len(queries)]:
            if isinstance(result, RequestFailed):
                raise result
            documents.append(result)
        return documents

    def _open_batch(self, num_queries: int) -> _Batch:
        """Return the current batch if so many queries fit in, otherwise a new one."""
        batch = self._batch
        if batch is not None:
            has_room = len(batch.queries) + num_queries <= MAX_BATCH
            if has_room and not batch.results.done():
                return batch
        queries: list[str] = []
        batch = _Batch(queries, asyncio.create_task(self._answer(queries, BATCH_WINDOW)))
        self._batch = batch
        return batch

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """Return the page at each address, None where there is none; raises as `search`."""
        return list(await asyncio.gather(*map(self._page, addresses)))

    def health(self) -> dict[str, Any]:
        """Wait until a service answers ``GET /health``; call it before any search.

        Returns:
            The health, which later replies must fit; empty for a service without that route. `unreachable`
            names the services that do not answer.

        Raises:
            UserError: The services serve different indexes.
            EnvironmentFailure: No service answers.
        """
        answers, self.unreachable = wait_for_any(
            "retriever",
            self.urls,
            ask_health,
            timeout=self.config.timeout,
            patience=self.config.patience,
            advice=f"{START_ADVICE} or set retriever.url",
            say=self._warn,
            token_variable=TOKEN_VARIABLE,
        )
        first_url, agreed = next(iter(answers.items()))
        for url, state in answers.items():
            mismatch = index_difference(agreed, state)
            if mismatch:
                raise UserError(
                    f"retriever.url: {url} has {mismatch} of {first_url}; name services of one index"
                )
        self._agreed = agreed
        return agreed

    async def unreachable_reason(self, seconds: float) -> str:
        """Return why no service answers ``GET /health`` now; empty if one does.

        Args:
            seconds: Time limit for the answer.
        """
        http, _ = self._connections.get()

        async def ask(url: str) -> str:
            try:
                async with asyncio.timeout(seconds):
                    await ask_health(http, url)
            except TimeoutError:
                return f"no answer within {seconds:g} s"
            except Unreachable as error:
                return str(error)
            return ""

        reasons = await asyncio.gather(*map(ask, self.urls))
        return "" if "" in reasons else reasons[0]

    def check_reranker(self, state: Mapping[str, Any]) -> str:
        """Return a phrase on whether documents are reranked.

        Args:
            state: Result of `health`. A service of another project does not name its reranker.

        Raises:
            UserError: The service's reranker does not fit the config.
        """
        config = self.config
        reranker = state.get("reranker")  # None: not named; "": none
        if not config.rerank_candidates:
            if reranker and config.rerank_candidates is None:
                raise UserError(
                    f"retriever {self.url}: its reranker {reranker} would be without effect; ask for it with"
                    " retriever.rerank_candidates=20, or set retriever.rerank_candidates=0"
                )
            return f"not reranked: the best {config.topk} documents"
        if reranker == "":
            raise UserError(
                f"retriever {self.url}: has no reranker, but retriever.rerank_candidates is"
                f" {config.rerank_candidates}; start it with --reranker_model, or set"
                " retriever.rerank_candidates=0"
            )
        if reranker is None:
            reranker = "a service that does not name its reranker"
        return f"{config.rerank_candidates} documents reranked to {config.topk} by {reranker}"

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        connections = self._connections.take()
        if connections is not None:
            http, replicas = connections
            await replicas.close()
            await http.close()

    async def _request(self, replicas: Replicas, queries: list[str]) -> list[QueryResult]:
        """Send one request to one of the services, and return its documents."""
        config = self.config
        is_reranked = bool(config.rerank_candidates)
        # The names of the depths tell the service which contract the request follows.
        depths: dict[str, Any]
        if is_reranked:
            depths = {
                "topk_retrieval": config.rerank_candidates,
                "topk_rerank": config.topk,
                "not_sort": False,
            }
        else:
            depths = {"topk": config.topk}

        def make_body() -> dict[str, Any]:
            # The request is sent now, so the batch takes no further queries.
            if self._batch is not None and self._batch.queries is queries:
                self._batch = None
            return {"queries": queries, "return_scores": True, **depths}

        def read_reply(url: str, reply: HttpReply) -> list[QueryResult]:
            documents = read_documents(url, reply, len(queries), is_reranked=is_reranked)
            self._has_answered = True
            return list(documents)

        return await replicas.post(SEARCH_ROUTE, make_body, read_reply)

    async def _answer(self, queries: list[str], window: float = 0.0) -> list[QueryResult]:
        """Return the result of each query; a request that fails is divided until it shows which fail.

        Other searches may add queries to the list for `window` seconds, and until a service is free.
        """
        _, replicas = self._connections.get()
        await asyncio.sleep(window)

        async def attempt() -> list[QueryResult] | None:
            """Return the results; None if the request fails and has several queries."""
            failure: Exception
            try:
                return await self._request(replicas, queries)
            except ServerError as error:
                if not await self._serves(replicas):
                    raise
                failure = BadReply(str(error))  # the service answers others, so these queries are the cause
            except (BadReply, QueryRefused) as error:
                failure = error
            if len(queries) > 1:
                return None
            raise failure

        try:
            results = await self._retry("answer", attempt)
        except RequestFailed as error:
            if isinstance(error, QueryRefused):
                await self._check_contract(queries)
            return [error] * len(queries)
        if results is not None:
            return results
        middle = len(queries) // 2
        first, second = await asyncio.gather(self._answer(queries[:middle]), self._answer(queries[middle:]))
        return first + second

    async def _page(self, address: str) -> Document | None:
        _, replicas = self._connections.get()
        body = {"urls": [self.config.page_address.replace("{}", address)]}

        async def attempt() -> Document | None:
            try:
                return await replicas.post(PAGE_ROUTE, lambda: body, partial(read_page, address=address))
            except ServerError as error:
                raise BadReply(str(error)) from error

        return await self._retry("page", attempt)

    async def _retry(self, subject: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt as the config says; raise RequestFailed if it fails in the end.

        The `subject` of the request is "answer" or "page", for messages.
        """
        patience = self.config.patience
        try:
            result = await retry(attempt, patience, self._note_away)
            self._note_back()
            return result
        except Unreachable as error:
            self._note_away(error)
            raise RequestFailed(
                "retriever",
                f"retriever {self.url}: {describe_patience(patience)} ({error}); {START_ADVICE},"
                " set retriever.url, or raise retriever.patience",
            ) from error
        except BadReply as error:
            raise RequestFailed(
                "retriever",
                f"retriever {self.url}: no usable {subject} in {BAD_REPLIES} attempts ({error})",
            ) from error

    def _note_away(self, error: Unreachable) -> None:
        """Warn of an outage, once."""
        if not self._is_away:
            self._is_away = True
            self._warn(f"retriever {self.url} does not answer ({error})")

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._warn(f"retriever {self.url} answers again")

    async def _serves(self, replicas: Replicas) -> bool:
        """Whether the services answer the probe, be it with a refusal."""
        try:
            with suppress(QueryRefused):
                await self._request(replicas, [PROBE])
        except (Unreachable, BadReply):
            return False
        return True

    async def _check_contract(self, refused: list[str]) -> None:
        """Raise UserError if the service refuses every query.

        If nothing was ever answered, the refusal of `refused` may come from another contract of the service.
        Then the run must not go on.
        """
        if self._has_answered or refused == [PROBE]:
            return
        (result,) = await self._answer([PROBE])
        if not isinstance(result, QueryRefused):
            return
        config = self.config
        if config.rerank_candidates:
            raise UserError(
                f"{result}; it refuses every query: is it a service with a reranker and the CalibAdv authors'"
                f" POST /retrieve, and does it take"
                f" retriever.rerank_candidates={config.rerank_candidates} and retriever.topk={config.topk}?"
            )
        raise UserError(
            f"{result}; it refuses every query: is it a service with Search-R1's POST /retrieve, and does it"
            f" take retriever.topk={config.topk}?"
        )
