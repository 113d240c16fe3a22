"""The retrieval service's client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import PAGE_ROUTE, ROUTE
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import BadReply, Unreachable, open_session, request
from calibadv_jax.services.replicas import Replica, Replicas
from calibadv_jax.services.retriever_health import ask_health, difference, token
from calibadv_jax.services.retriever_replies import Broken, read_documents, read_page
from calibadv_jax.services.waiting import BAD_REPLIES, Waits, no_answer, wait_for_any

BATCH_WINDOW = 0.002  # seconds a query waits for others to share its request
MAX_BATCH = 256  # queries in one request
PROBE = "test"  # a query that no service can object to

Outcome = list[Document] | RequestFailed  # of one query
T = TypeVar("T")


@dataclass
class _Batch:
    """Queries that share a request."""

    queries: list[str]
    outcomes: asyncio.Task[list[Outcome]]


class RetrieverClient:
    """Implements `interfaces.Retriever` over ``POST /retrieve``, of one service or several.

    The contract is Search-R1's, or where documents are reranked that of the CalibAdv authors.
    One request is under way at each service at a time; queries that come meanwhile share the next one. While
    all services are away a search waits, for `config.patience` seconds.

    Args:
        url: base URLs.
        warn: told what is waited for at the start, and which service is left out and why.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        url: str | Sequence[str],
        warn: Callable[[str], object] = lambda _: None,
    ):
        self.config, self._warn = config, warn
        self.urls = [one.rstrip("/") for one in ([url] if isinstance(url, str) else url)]
        self.url = ", ".join(self.urls)  # in messages
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: aiohttp.ClientSession | None = None
        self._batch: _Batch | None = None  # still takes queries
        self._replicas: Replicas | None = None  # of the running event loop, as the connections
        self._has_answered = False
        self._agreed: dict[str, Any] | None = None  # what `health` gave: searches take documents of that only
        self._named: set[str] = set()  # of `Replicas`
        self.missing: dict[str, str] = {}  # services that did not answer `health`, and why

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Documents of each query, best first.

        Raises:
            QueryRefused: the service does not take one of the queries.
            RequestFailed: it was away for longer than `config.patience`, or answers nonsense.
            UserError: it asks for a token, has no such route, refuses every query, or serves another index
                than when `health` was called.
        """
        loop = self._enter_loop()
        batch = self._batch
        is_full = batch is not None and len(batch.queries) + len(queries) > MAX_BATCH
        if batch is None or is_full or batch.outcomes.done():
            shared: list[str] = []
            batch = self._batch = _Batch(shared, loop.create_task(self._answer(shared, BATCH_WINDOW)))
        start = len(batch.queries)
        batch.queries += queries
        found = []
        # Shielded: others wait for the same request. Whatever ends its task is raised here.
        for outcome in (await asyncio.shield(batch.outcomes))[start : start + len(queries)]:
            if isinstance(outcome, RequestFailed):
                raise outcome
            found.append(outcome)
        return found

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """The page at each address, put into `config.page_address`; None where there is none.

        Raises:
            As `search`, also where the pages are others; UserError where the service has none.
        """
        self._enter_loop()
        return list(await asyncio.gather(*map(self._page, addresses)))

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop; connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._http = loop, open_session(self.config.timeout, token())
            self._batch = None
            self._replicas = Replicas(self._http, self.urls, self._agreed, self._named, self._warn)
        return loop

    def health(self) -> dict[str, Any]:
        """What the services report about themselves on ``GET /health``; empty where they have no such route.

        Waits until one of them answers, for `config.patience` seconds; `missing` names those that do not.
        To be called before the first search.

        Raises:
            UserError: none can be reached, or they serve different indexes.
        """
        present = wait_for_any(
            "retriever",
            self.urls,
            ask_health,
            timeout=self.config.timeout,
            patience=self.config.patience,
            advice="start it with scripts/launch_retriever.sh or set retriever.url",
            say=self._warn,
            token=token(),
        )
        self.missing = present.missing
        (first, agreed), *others = present.answers.items()
        for url, state in others:
            if other := difference(agreed, state):
                raise UserError(f"retriever.url: {url} has {other} of {first}; name services of one index")
        self._agreed = agreed
        return agreed

    def check_reranker(self, state: Mapping[str, Any]) -> str:
        """Whether documents are reranked, in words.

        Args:
            state: what `health` gave; a service of another make does not say what it has.

        Raises:
            UserError: the config asks for a reranker that the service lacks, or leaves one without effect.
        """
        config, model = self.config, state.get("reranker")
        if not config.rerank_topk:
            if model and config.rerank_topk is None:
                raise UserError(
                    f"retriever {self.url}: its reranker {model} would be without effect; ask for it with"
                    " retriever.retrieval_topk=20 retriever.rerank_topk=3, or set retriever.rerank_topk=0"
                )
            return f"not reranked: the best {config.topk} documents"
        if model == "":
            raise UserError(
                f"retriever {self.url}: has no reranker, but retriever.rerank_topk is {config.rerank_topk};"
                " start it with --reranker_model, or set retriever.retrieval_topk=0 retriever.rerank_topk=0"
            )
        who = "a service that does not name its reranker" if model is None else model
        return f"{config.retrieval_topk} documents reranked to {config.rerank_topk} by {who}"

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        if self._loop is asyncio.get_running_loop():
            assert self._http is not None and self._replicas is not None
            await self._replicas.close()
            await self._http.close()
            self._loop = None

    @property
    def _depths(self) -> dict[str, Any]:
        """The fields of a request that say how many documents, and by that whose contract it is."""
        config = self.config
        if not config.rerank_topk:
            return {"topk": config.topk}
        depths = {"topk_retrieval": config.retrieval_topk, "topk_rerank": config.rerank_topk}
        return depths | {"not_sort": False}

    @property
    def _contract(self) -> str:
        """What the service must understand, for messages."""
        config = self.config
        if config.rerank_topk:
            return (
                "a reranker and the CalibAdv authors' POST /retrieve, and does it take"
                f" retriever.retrieval_topk={config.retrieval_topk} and rerank_topk={config.rerank_topk}"
            )
        return f"Search-R1's POST /retrieve, and does it take retriever.topk={config.topk}"

    async def _answer(self, queries: list[str], window: float = 0.0, is_probe: bool = False) -> list[Outcome]:
        """What became of each query. A request that fails is divided, until it shows which queries fail.

        Args:
            queries: if others still join them, they do so until a service is free.
            window: seconds that are left to others to join.
            is_probe: whether a failure is the outcome at once, without patience.
        """
        assert self._http is not None and self._replicas is not None
        http, replicas, waits = self._http, self._replicas, Waits(self.config.patience)

        async def ask(replica: Replica) -> list[Outcome]:
            if self._batch is not None and self._batch.queries is queries:
                self._batch = None
            body = {"queries": queries, "return_scores": True} | self._depths
            reply = await request(http, "POST", replica.url + ROUTE, json=body)
            if not reply.is_away:
                await replicas.check(replica, reply)
            found = read_documents(replica.url, reply, len(queries), bool(self.config.rerank_topk))
            self._has_answered = True
            return list(found)

        await asyncio.sleep(window)
        while True:
            try:
                return await self._ask_any(ask)
            except (Unreachable, BadReply, QueryRefused) as error:
                failure: Unreachable | BadReply | QueryRefused = error
            if is_probe:
                return [failure if isinstance(failure, QueryRefused) else self._failed(str(failure))]
            if isinstance(failure, Unreachable) and not (
                isinstance(failure, Broken) and await self._serves()
            ):
                if not await waits.for_a_service(failure.retry_after):
                    return [self._gave_up(failure)] * len(queries)
            elif len(queries) > 1:
                middle = len(queries) // 2
                parts = await asyncio.gather(self._answer(queries[:middle]), self._answer(queries[middle:]))
                return [outcome for part in parts for outcome in part]
            elif isinstance(failure, QueryRefused):
                await self._check_contract(queries)
                return [failure]
            elif not await waits.for_a_good_reply():
                return [self._failed(f"no usable answer in {BAD_REPLIES} attempts ({failure})")]

    async def _page(self, address: str) -> Document | None:
        assert self._http is not None and self._replicas is not None
        http, replicas, waits = self._http, self._replicas, Waits(self.config.patience)
        body = {"urls": [self.config.page_address.replace("{}", address)]}

        async def ask(replica: Replica) -> Document | None:
            reply = await request(http, "POST", replica.url + PAGE_ROUTE, json=body)
            if not reply.is_away:
                await replicas.check(replica, reply)
            return read_page(replica.url, reply, address)

        while True:
            try:
                return await self._ask_any(ask)
            except (Unreachable, BadReply) as error:
                failure: Unreachable | BadReply = error
            if isinstance(failure, Unreachable) and not isinstance(failure, Broken):
                if not await waits.for_a_service(failure.retry_after):
                    raise self._gave_up(failure)
            elif not await waits.for_a_good_reply():
                raise self._failed(f"no usable page in {BAD_REPLIES} attempts ({failure})")

    async def _ask_any(self, ask: Callable[[Replica], Awaitable[T]]) -> T:
        """What a free service answers. One that is away is left out, and another one is asked.

        Raises:
            Unreachable: none is left. Other errors of `ask` pass.
        """
        assert self._replicas is not None
        while True:
            replica = await self._replicas.take()
            try:
                return await ask(replica)
            except Unreachable as error:
                if not self._replicas.leave_out(replica, error):
                    raise
            finally:
                self._replicas.give_back(replica)

    async def _serves(self) -> bool:
        """Whether the service answers an ordinary query, if only to refuse it."""
        (outcome,) = await self._answer([PROBE], is_probe=True)
        return isinstance(outcome, QueryRefused | list)

    async def _check_contract(self, refused: list[str]) -> None:
        """If nothing was ever answered, a refusal may mean every query: then the run must not go on."""
        if self._has_answered or refused == [PROBE]:
            return
        (outcome,) = await self._answer([PROBE])
        if isinstance(outcome, QueryRefused):
            raise UserError(f"{outcome}; it refuses every query: is it a service with {self._contract}?")

    def _failed(self, reason: str) -> RequestFailed:
        return RequestFailed("retriever", f"retriever {self.url}: {reason}")

    def _gave_up(self, reason: Unreachable) -> RequestFailed:
        return self._failed(
            f"{no_answer(self.config.patience)} ({reason}); start it with"
            " scripts/launch_retriever.sh, set retriever.url, or raise retriever.patience"
        )
