"""Client of the retrieval service: one running service, several that answer alike, or a child process.

The contract is Search-R1's, or that of the CalibAdv authors where documents are reranked.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import aiohttp
from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER, PAGE_ROUTE, ROUTE
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.http_client import (
    AWAY,
    BAD_REPLIES,
    LAST_PAUSE,
    BadReply,
    HttpReply,
    PerLoop,
    Unreachable,
    Warn,
    excerpt,
    no_answer,
    open_session,
    request,
    retry,
    wait_for_any,
)

BATCH_WINDOW = 0.002  # seconds a query waits for others to share its request
MAX_BATCH = 256  # queries in one request
PROBE = "test"  # a query that no service can object to
START_IT = "start it with scripts/launch_retriever.sh"
CHECK_PAUSE = 0.5  # seconds before a service that failed is asked for its health; doubles up to LAST_PAUSE
TOKEN_VARIABLE = "RETRIEVER_TOKEN"  # the service's own; a config would be written to the run folder
SAME = ("corpus_sha256", "encoder", "model", "reranker", "pages_sha256")  # of services that answer alike
IDENTITY = "identity"  # of this project's services: index, reranker and pages in one string
IDENTITY_HEADER = "X-Index-Identity"  # the same string, on every reply of POST /retrieve and POST /access

QueryResult = list[Document] | RequestFailed
T = TypeVar("T")


class Away(Unreachable):
    """The service says itself that it cannot answer now."""


class Broken(Away):
    """The service failed over a request: because of its queries, or it fails over all."""


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

    Raises Away (or Broken) if the service cannot answer now, BadReply for no answer to `num_queries` queries,
    QueryRefused if it refuses one of them, UserError if it asks for a token or has no such route.
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
        fault = f"retriever {url}: asks for a token"
        raise UserError(f"{fault}; set the environment variable {TOKEN_VARIABLE} to it")
    if reply.status in (403, 404, 405):
        raise UserError(f"retriever {url}: {reply.excerpt}; {no_such_route}")
    if reply.status in (400, 413, 422):  # of the query; asking again changes nothing
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


def difference(agreed: Mapping[str, Any] | None, state: Mapping[str, Any]) -> str:
    """Return how a service's documents differ from the agreed ones; empty if nothing shows a difference."""
    if agreed is None:
        return ""
    names = [*SAME, IDENTITY] if IDENTITY in agreed and IDENTITY in state else SAME
    for name in names:
        if state.get(name) != agreed.get(name):
            return f"{name} {state.get(name)!r} instead of {agreed.get(name)!r}"
    return ""


def identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a service's state that decides its documents; may be empty."""
    return {name: state[name] for name in (*SAME, IDENTITY) if name in state}


@dataclass(eq=False)
class Replica:
    url: str
    pause: float = CHECK_PAUSE  # before its health is asked for
    is_verified: bool = False  # it has shown its index since it was last away
    other: str = ""  # how its index differs from the agreed index
    recovery: asyncio.Task[None] | None = None  # waits for its health; None: it gets requests


class Replicas:
    """Services of one index, each with one request under way at a time. For one event loop.

    A service that is away, or serves another index than the `agreed` health (None: nothing is compared), gets
    no further requests until its ``GET /health`` is good. `warn` is called, and the next service is asked.
    """

    def __init__(
        self, http: aiohttp.ClientSession, urls: Sequence[str], agreed: Mapping[str, Any] | None, warn: Warn
    ):
        self._http, self._agreed, self._warn = http, agreed, warn
        self._all = [Replica(url) for url in urls]
        self._free: asyncio.Queue[Replica] = asyncio.Queue()  # the one asked longest ago comes first
        for replica in self._all:
            self._free.put_nowait(replica)

    async def close(self) -> None:
        recoveries = [replica.recovery for replica in self._all if replica.recovery is not None]
        for recovery in recoveries:
            recovery.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)

    async def post(
        self, route: str, body: Callable[[], Mapping[str, Any]], read: Callable[[str, HttpReply], T]
    ) -> T:
        """Return `read` of a free service's URL and reply; `body` is called when a service is free.

        Instead of one that is away or of another index, another is asked. Raises Unreachable if none is left,
        UserError if all serve another index.
        """
        while True:
            replica = await self._free.get()
            try:
                reply = await request(self._http, "POST", replica.url + route, json=body())
                if not reply.is_away:
                    await self._check_index(replica, reply)
                return read(replica.url, reply)
            except Unreachable as error:
                if not self._leave_out(replica, error):
                    raise
            finally:
                if replica.recovery is None:
                    self._free.put_nowait(replica)

    def _leave_out(self, replica: Replica, reason: Unreachable) -> bool:
        """Send the service no requests until its health is good; keep the last service, and return False."""
        replica.is_verified = False
        if all(candidate.other for candidate in self._all):
            raise UserError(
                f"retriever {replica.url} serves another index than at the start of this run"
                f" ({replica.other}); serve the index that the run began with, or begin another run"
            )
        if all(other.recovery for other in self._all if other is not replica):
            return False
        if not replica.other and not isinstance(reason, Away):
            self._warn(f"retriever {replica.url} is left out until it answers: {reason}")
        replica.recovery = asyncio.create_task(self._recover(replica, reason.retry_after))
        return True

    async def _recover(self, replica: Replica, seconds: float) -> None:
        """Wait until its health is good; a service without that route need only answer."""
        is_well = False
        while not is_well:
            await asyncio.sleep(min(max(replica.pause, seconds), LAST_PAUSE))
            replica.pause = min(2 * replica.pause, LAST_PAUSE)
            try:
                state = await ask_health(self._http, replica.url)
            except Unreachable:
                replica.other = ""  # it may come back with the agreed index
                continue
            self._note_index(replica, difference(self._agreed, state))
            is_well = not replica.other
        replica.recovery = None
        self._free.put_nowait(replica)

    async def _check_index(self, replica: Replica, reply: HttpReply) -> None:
        """Raise Unreachable unless the reply is of the agreed index."""
        agreed, name = (self._agreed or {}).get(IDENTITY), reply.headers.get(IDENTITY_HEADER)
        if agreed is not None and name is not None:
            self._note_index(replica, "" if name == agreed else f"{IDENTITY} {name!r} instead of {agreed!r}")
        elif self._agreed is not None and not replica.is_verified:
            state = await ask_health(self._http, replica.url)
            self._note_index(replica, difference(self._agreed, state))
        if replica.other:
            raise Unreachable(f"it serves another index: {replica.other}")
        replica.pause = CHECK_PAUSE

    def _note_index(self, replica: Replica, other: str) -> None:
        if other and other != replica.other:
            self._warn(
                f"retriever {replica.url} serves another index ({other}) and is left out; serve the one that"
                " the run began with"
            )
        replica.other, replica.is_verified = other, not other


@dataclass
class _Batch:
    queries: list[str]
    results: asyncio.Task[list[QueryResult]]


class RetrieverClient:
    """Implements `interfaces.Retriever` over ``POST /retrieve``, of the services at one or several URLs.

    Each has one request under way; queries that come meanwhile share the next one. While all are away a
    search waits, for `config.patience` seconds. `warn` gets lines about waits and services that are left out.
    """

    def __init__(self, config: RetrieverConfig, url: str | Sequence[str], warn: Warn = lambda _: None):
        self.config, self._warn = config, warn
        self.urls = [base.rstrip("/") for base in ([url] if isinstance(url, str) else url)]
        self.url = ", ".join(self.urls)  # in messages
        self._connections = PerLoop(self._connect)
        self._batch: _Batch | None = None  # still takes queries
        self._has_answered = False
        self._agreed: dict[str, Any] | None = None  # of `health`: searches take documents of that only
        self.missing: dict[str, str] = {}  # services that did not answer `health`, and why

    def _connect(self) -> tuple[aiohttp.ClientSession, Replicas]:
        self._batch = None
        http = open_session(self.config.timeout, TOKEN_VARIABLE)
        return http, Replicas(http, self.urls, self._agreed, self._warn)

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return the documents of each query, best first.

        Raises QueryRefused if one is not taken; RequestFailed if the service was away for `config.patience`,
        or breaks the contract; UserError if it asks for a token, has no such route, refuses every query, or
        serves another index than at `health`.
        """
        self._connections.get()
        batch = self._batch
        if batch is None or len(batch.queries) + len(queries) > MAX_BATCH or batch.results.done():
            shared: list[str] = []
            batch = self._batch = _Batch(shared, asyncio.create_task(self._answer(shared, BATCH_WINDOW)))
        start = len(batch.queries)
        batch.queries += queries
        documents = []
        # Shielded: others wait for the same request. Whatever ends its task is raised here.
        for result in (await asyncio.shield(batch.results))[start : start + len(queries)]:
            if isinstance(result, RequestFailed):
                raise result
            documents.append(result)
        return documents

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """Return the page at each address, None where there is none; raises as `search`."""
        return list(await asyncio.gather(*map(self._page, addresses)))

    def health(self) -> dict[str, Any]:
        """Wait for the services' reply to ``GET /health`` (empty without that route), before any search.

        `missing` names those that do not answer. Raises UserError if none does, or if their indexes differ.
        """
        answers, self.missing = wait_for_any(
            "retriever",
            self.urls,
            ask_health,
            timeout=self.config.timeout,
            patience=self.config.patience,
            advice=f"{START_IT} or set retriever.url",
            say=self._warn,
            token_variable=TOKEN_VARIABLE,
        )
        first, agreed = next(iter(answers.items()))
        for url, state in answers.items():
            if other := difference(agreed, state):
                raise UserError(f"retriever.url: {url} has {other} of {first}; name services of one index")
        self._agreed = agreed
        return agreed

    def check_reranker(self, state: Mapping[str, Any]) -> str:
        """Say whether documents are reranked, by the `state` of `health`; UserError if not as configured."""
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
        reranker = "a service that does not name its reranker" if model is None else model
        return f"{config.retrieval_topk} documents reranked to {config.rerank_topk} by {reranker}"

    async def close(self) -> None:
        if (connections := self._connections.take()) is not None:
            http, replicas = connections
            await replicas.close()
            await http.close()

    async def _request(self, replicas: Replicas, queries: list[str]) -> list[QueryResult]:
        top, best = self.config.retrieval_topk, self.config.rerank_topk
        depths: dict[str, Any] = {"topk": self.config.topk}  # how many documents, and by that whose contract
        if best:
            depths = {"topk_retrieval": top, "topk_rerank": best, "not_sort": False}

        def body() -> dict[str, Any]:
            if self._batch is not None and self._batch.queries is queries:
                self._batch = None
            return {"queries": queries, "return_scores": True} | depths

        def read(url: str, reply: HttpReply) -> list[QueryResult]:
            documents = read_documents(url, reply, len(queries), is_reranked=bool(best))
            self._has_answered = True
            return list(documents)

        return await replicas.post(ROUTE, body, read)

    async def _answer(self, queries: list[str], window: float = 0.0) -> list[QueryResult]:
        """Return the result of each query; a request that fails is divided until it shows which fail."""
        _, replicas = self._connections.get()
        await asyncio.sleep(window)

        async def attempt() -> list[QueryResult] | None:
            try:
                return await self._request(replicas, queries)
            except Broken as error:
                if not await self._serves(replicas):
                    raise
                failure: Exception = BadReply(str(error))  # it is these queries that break it
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
        halves = await asyncio.gather(self._answer(queries[:middle]), self._answer(queries[middle:]))
        return [result for half in halves for result in half]

    async def _page(self, address: str) -> Document | None:
        _, replicas = self._connections.get()
        body = {"urls": [self.config.page_address.replace("{}", address)]}

        async def attempt() -> Document | None:
            try:
                return await replicas.post(PAGE_ROUTE, lambda: body, partial(read_page, address=address))
            except Broken as error:
                raise BadReply(str(error)) from error

        return await self._retry("page", attempt)

    async def _retry(self, subject: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt as the config says; RequestFailed if it fails in the end."""
        patience = self.config.patience
        try:
            return await retry(attempt, patience)
        except (Unreachable, BadReply) as error:
            problem = f"no usable {subject} in {BAD_REPLIES} attempts ({error})"
            if isinstance(error, Unreachable):
                advice = f"{START_IT}, set retriever.url, or raise retriever.patience"
                problem = f"{no_answer(patience)} ({error}); {advice}"
            raise RequestFailed("retriever", f"retriever {self.url}: {problem}") from error

    async def _serves(self, replicas: Replicas) -> bool:
        try:
            with suppress(QueryRefused):
                await self._request(replicas, [PROBE])
        except (Unreachable, BadReply):
            return False
        return True

    async def _check_contract(self, refused: list[str]) -> None:
        """If nothing was ever answered, a refusal may mean every query: then the run must not go on."""
        if self._has_answered or refused == [PROBE]:
            return
        (result,) = await self._answer([PROBE])
        if isinstance(result, QueryRefused):
            config, service, keys = self.config, "Search-R1's", f"topk={self.config.topk}"
            if config.rerank_topk:
                service = "a reranker and the CalibAdv authors'"
                keys = f"retrieval_topk={config.retrieval_topk} and rerank_topk={config.rerank_topk}"
            question = f"is it a service with {service} POST /retrieve, and does it take retriever.{keys}?"
            raise UserError(f"{result}; it refuses every query: {question}")


class RetrieverProcess(ChildService):
    """The service as a child process, whose output goes to `log_path`."""

    def __init__(self, config: RetrieverConfig, log_path: Path):
        options = {
            "corpus_path": config.corpus,
            "retriever_name": config.encoder,
            "index_path": config.index or f"{config.corpus}.index",
            "retrieval_topk": config.topk,
            "threads": config.threads,
            "retriever_model": config.model,
            "pages_path": config.pages,
            "reranker_model": config.reranker,
        }
        command = [sys.executable, "-m", "retriever.serve", "--build_if_missing"]
        for name, value in options.items():
            command += [f"--{name}", str(value)] if value != "" else []
        super().__init__("the retriever", command, log_path, config.start_timeout, "retriever.start_timeout")


def check_running(config: RetrieverConfig, warn: Warn) -> None:
    """Wait for a service of `config.url`; UserError if none answers in time, or reranking differs."""
    client = RetrieverClient(config, config.url, warn)
    client.check_reranker(client.health())


@contextmanager
def open_retriever(config: RetrieverConfig, log_path: Path, warn: Warn) -> Iterator[str | list[str]]:
    """Yield the URLs of `config.url`, or of a child that ends with the block; raises as `check_running`."""
    if config.url:
        if config.url != NO_RETRIEVER:
            check_running(config, warn)
        yield config.url
        return
    if not config.corpus:
        raise UserError("retriever.url is empty: set it, or retriever.corpus to start a service here")
    with RetrieverProcess(config, log_path) as process:
        yield process.url
