"""The retrieval service's client, and the service as a child process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.errors import UserError
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.http_client import Unreachable, open_session, post
from calibadv_jax.trajectory import Document

BATCH_WINDOW = 0.002  # seconds a query waits for others to share its request
MAX_BATCH = 256  # queries in one request
FIRST_DELAY = 0.2  # seconds before the second attempt; doubles up to LAST_DELAY
LAST_DELAY = 10.0
TOKEN_VARIABLE = "RETRIEVER_TOKEN"  # the service's own; a config would be written to the run folder


class BadReply(Exception):
    """The service answered, but not what the contract says."""


class RetrieverClient:
    """Implements `interfaces.Retriever` over Search-R1's ``POST /retrieve``.

    Queries that arrive together share a request. A failed request is repeated `config.retries` times
    with growing pauses; then every waiting caller gets one UserError.
    """

    def __init__(self, config: RetrieverConfig, url: str):
        self.config, self.url = config, url.rstrip("/")
        self._waiting: list[tuple[str, asyncio.Future[list[Document]]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: Any = None

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Documents of each query, best first.

        Raises:
            UserError: the service can not be reached, is too slow, answers nonsense, or asks for a token.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # connections belong to the loop that opened them
            self._loop, self._waiting, self._sender = loop, [], None
            self._http = open_session(self.config.timeout, os.environ.get(TOKEN_VARIABLE, "").strip())
        futures = [loop.create_future() for _ in queries]
        self._waiting += zip(queries, futures, strict=True)
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send())
        return list(await asyncio.gather(*futures))

    def health(self) -> dict[str, Any]:
        """What the service says of itself on ``GET /health``; empty where it has no such route.

        Raises:
            UserError: it can not be reached.
        """
        try:
            response = httpx.get(f"{self.url}/health", timeout=self.config.timeout, trust_env=False)
        except httpx.HTTPError as error:
            raise UserError(
                f"retriever {self.url}: can not be reached ({type(error).__name__}); start it with"
                " scripts/launch_retriever.sh or set retriever.url"
            ) from error
        is_json = response.headers.get("content-type", "").startswith("application/json")
        state = response.json() if response.status_code == 200 and is_json else {}
        return state if isinstance(state, dict) else {}

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        if self._loop is asyncio.get_running_loop():
            await self._http.close()
            self._loop = None

    async def _send(self) -> None:
        """Ends where nothing waits, without a pause in between: a query that comes later starts it anew."""
        while self._waiting:
            await asyncio.sleep(BATCH_WINDOW)
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            try:
                found = await self._with_retries(self._http, [query for query, _ in batch])
            except UserError as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), documents in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(documents)

    async def _with_retries(self, http: Any, queries: list[str]) -> list[list[Document]]:
        delay = FIRST_DELAY
        for attempt in range(self.config.retries + 1):
            try:
                return await self._request(http, queries)
            except (Unreachable, BadReply) as error:
                last = str(error)
            if attempt < self.config.retries:
                await asyncio.sleep(delay)
                delay = min(LAST_DELAY, 2 * delay)
        raise UserError(
            f"retriever {self.url}: no usable answer after {self.config.retries + 1} attempts"
            f" ({last}); start it with scripts/launch_retriever.sh or set retriever.url"
        )

    async def _request(self, http: Any, queries: list[str]) -> list[list[Document]]:
        body = {"queries": queries, "topk": self.config.topk, "return_scores": True}
        status, reply = await post(http, f"{self.url}/retrieve", json=body)
        if status == 401:
            raise UserError(
                f"retriever {self.url}: asks for a token; set the environment variable {TOKEN_VARIABLE} to it"
            )
        if status != 200:
            raise BadReply(f"status {status}: {_excerpt(reply)}")
        try:
            return parse_reply(json.loads(reply), len(queries))
        except ValueError as error:  # also what json.loads raises
            raise BadReply(f"{error} in {_excerpt(reply)}") from error


def parse_reply(reply: Any, num_queries: int) -> list[list[Document]]:
    """The documents of a Search-R1 reply.

    Raises:
        ValueError: not of the contract's form.
    """
    lists = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(lists, list) or len(lists) != num_queries:
        raise ValueError(f"expected 'result' with {num_queries} lists")
    if not all(isinstance(one, list) for one in lists):
        raise ValueError("expected a list of documents for every query")
    return [[_document(item) for item in one] for one in lists]


def _document(item: Any) -> Document:
    row = item.get("document") if isinstance(item, dict) else None
    if not isinstance(row, dict) or not isinstance(row.get("contents"), str):
        raise ValueError("expected items {'document': {'id', 'contents'}, 'score'}")
    title, _, text = row["contents"].partition("\n")
    title = title.strip().removeprefix('"').removesuffix('"')
    score = item.get("score")
    return Document(str(row.get("id", title)), title, text, None if score is None else float(score))


def _excerpt(reply: bytes) -> str:
    """Its beginning, on one line."""
    return repr(" ".join(reply.decode(errors="replace").split())[:120])


class RetrieverProcess(ChildService):
    """The service as a child process: ready when the block begins, gone when it ends.

    Args:
        log_path: the child's output.
    """

    def __init__(self, config: RetrieverConfig, log_path: Path):
        command = [sys.executable, "-m", "retriever.serve", "--build_if_missing"]
        command += ["--corpus_path", config.corpus, "--retriever_name", config.encoder]
        command += ["--index_path", config.index or f"{config.corpus}.index"]
        command += ["--retrieval_topk", str(config.topk), "--threads", str(config.threads)]
        super().__init__("the retriever", command, log_path, config.start_timeout, "retriever.start_timeout")


@contextmanager
def open_retriever(config: RetrieverConfig, log_path: Path) -> Iterator[str]:
    """Base URL of a retrieval service: `config.url`, or a child process that ends with the block.

    Raises:
        UserError: neither is configured, or the child does not become ready.
    """
    if config.url:
        yield config.url
        return
    if not config.corpus:
        raise UserError("retriever.url is empty: set it, or retriever.corpus to start a service here")
    with RetrieverProcess(config, log_path) as process:
        yield process.url
