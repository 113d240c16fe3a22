"""The running service: put together from its options, loaded beside its socket, ended by a signal."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from retriever.backends import find_remote, load_object
from retriever.corpus.pages import Pages
from retriever.corpus.passages import load_corpus
from retriever.encoders.reranker import Reranker
from retriever.errors import RetrieverError
from retriever.files import atomic_write
from retriever.indexes.build import build_index
from retriever.indexes.index import Index, open_index
from retriever.indexes.manifest import MANIFEST, read_manifest
from retriever.indexes.resources import available_cores
from retriever.interfaces import Searcher
from retriever.options import build_options, index_options, read_token
from retriever.service.app import RequireToken, make_app
from retriever.service.cache import ResultCache
from retriever.service.engine import Limits

SPARE_FILES = 128  # descriptors left for the index, the store and the log
MAX_HEAD = 2**16  # bytes of a request's head, and of what follows a body in chunks; then 400
REPLY = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
BUSY = b'{"error": "all connections are in use; try again later, or start with a larger --max_connections"}'
INVALID = b'{"error": "not a valid HTTP request, or its head is larger than %d bytes"}' % MAX_HEAD


def allowed_connections(limit: int) -> int:
    """Return at most the number of files that may be open; raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return max(1, min(limit, hard - SPARE_FILES))
    if soft != resource.RLIM_INFINITY:  # macOS refuses a soft limit without a number
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit + SPARE_FILES), hard))
    return limit


class _BoundedHeads(h11.Connection):
    """Refuses heads and trailers above MAX_HEAD bytes; h11 itself accepts any that come in one piece."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._received = self._read = 0  # bytes, and those of events

    def receive_data(self, data: bytes) -> None:
        self._received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Event):
            before, self._read = self._read, self._received - len(self.trailing_data[0])
            if not isinstance(event, h11.Data) and self._read - before > MAX_HEAD:
                raise h11.RemoteProtocolError("the head is too large")
        return event


class Bounded(H11Protocol):
    """uvicorn's HTTP protocol over h11 with limits, which `bounded_protocol` sets.

    httptools, which uvicorn prefers, keeps heads and trailers of any length. Beyond `max_connections` a new
    connection replaces the one that has waited longest without a request; if all have one, it gets 503.
    """

    max_connections: int
    seconds: float
    _turns = itertools.count()  # not the time: connections of one round of the loop may have the same

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _BoundedHeads()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._turn = next(self._turns)
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        connections: list[Any] = [item for item in self.connections if not item.transport.is_closing()]
        if len(connections) <= self.max_connections:
            return
        waiting = [item for item in connections if item is not self and item.is_waiting()]
        waiting.sort(key=lambda item: item._turn)
        if victim := next((item for item in waiting if not item.has_unread()), None):
            victim.transport.abort()
        else:
            self._refuse(b"503 Service Unavailable\r\nretry-after: 1", BUSY)

    def has_unread(self) -> bool:
        """Whether received bytes are not read yet: the loop accepts many connections before it reads."""
        poll = select.poll()  # unlike `select.select`, for descriptors above 1,023 too
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def send_400_response(self, msg: str) -> None:
        """Reply with JSON as for every other error; uvicorn's own reply is plain text."""
        if self.is_waiting() or not self.cycle.response_started:
            self._refuse(b"400 Bad Request", INVALID)
        self.transport.close()

    def _refuse(self, status: bytes, text: bytes) -> None:
        self.transport.write(REPLY % (status, len(text), text))
        self.transport.close()

    def is_waiting(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self.is_waiting():
            self._turn = next(self._turns)
            self._deadline.cancel()
        elif self._deadline.cancelled():  # the first part of the next request
            self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline.cancel()
        self._deadline = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


def bounded_protocol(max_connections: int, seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol with these limits.

    In `seconds` a client must send a request's head, and take a reply; `BodyLimit` times the body.
    """
    return type("Bounded", (Bounded,), {"max_connections": max_connections, "seconds": seconds})


ReportStage = Callable[[str], None]

RETRY_SECONDS = 5  # while the index is loaded


class Loading:
    """ASGI application that loads another one in a thread, and then hands requests to it.

    `load` reports its stage to a function. With a `token`, /health alone answers requests without it.
    """

    def __init__(self, load: Callable[[ReportStage], Any], token: str = ""):
        self._load = load
        self._app: Any = RequireToken(self._reply_loading, token) if token else self._reply_loading
        self._stage, self._begun = "starting", time.monotonic()

    async def wait(self) -> None:
        """Load the application; raises what its loading raises."""
        loaded: Future[Any] = Future()
        loaded.set_running_or_notify_cancel()

        def work() -> None:
            try:
                loaded.set_result(self._load(self._report))
            except BaseException as error:
                loaded.set_exception(error)

        # A daemon: a service that is stopped does not wait until a large index is loaded.
        threading.Thread(target=work, name="load", daemon=True).start()
        self._app = await asyncio.wrap_future(loaded)

    def _report(self, stage: str) -> None:
        self._stage = stage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    async def _reply_loading(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seconds = round(time.monotonic() - self._begun, 1)
            state = {"status": "loading", "stage": self._stage, "seconds": seconds}
            if scope["path"] != "/health":
                state = {"error": f"not ready yet: {self._stage}, {seconds:g} s since the start"}
            reply = JSONResponse(state, status_code=503, headers={"Retry-After": str(RETRY_SECONDS)})
            await reply(scope, receive, send)


def load(arguments: argparse.Namespace, report: ReportStage = lambda _: None) -> FastAPI:
    """Return the application of the options; raises RetrieverError if parts are missing or do not fit."""
    token = read_token(arguments)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.stderr.write(f"warning: {arguments.host} is open to the network without --token_file\n")
    searcher: Searcher
    if remote := find_remote(arguments):
        report(f"opening {remote.searcher}")
        searcher = load_object(remote.searcher)(arguments)
    else:
        searcher = load_index(arguments, report)
    reranker = cache = pages = None
    if arguments.reranker_model:
        report("loading the reranker")
        reranker = Reranker(arguments.reranker_model, arguments.reranker_batch_size)
    if arguments.cache_path is not None:
        cache = ResultCache(arguments.cache_path, searcher.manifest, arguments.cache_mode)
    if arguments.pages_path is not None:
        report("reading the pages")
        pages = Pages(arguments.pages_path)
    limits = Limits(
        max_batch=arguments.max_batch,
        max_queue=arguments.max_queue,
        max_queries=arguments.max_queries,
        max_results=arguments.max_results,
        workers=_workers(arguments),
        request_seconds=arguments.request_seconds,
    )
    return make_app(
        searcher,
        arguments.retrieval_topk,
        arguments.reranking_topk,
        reranker=reranker,
        cache=cache,
        pages=pages,
        limits=limits,
        token=token,
    )


def _workers(arguments: argparse.Namespace) -> int:
    # One search for each core at the same time, unless the kind says otherwise.
    if (remote := find_remote(arguments)) and remote.workers:
        return remote.workers
    return arguments.threads or max(1, available_cores() // int(os.environ.get("OMP_NUM_THREADS") or 1))


def load_index(arguments: argparse.Namespace, report: ReportStage) -> Index:
    """Open the index over its corpus, built first if missing; raises RetrieverError if it does not fit."""
    path = arguments.index_path
    report(f"reading the corpus {arguments.corpus_path}")
    corpus = load_corpus(arguments.corpus_path)
    has_index = path.is_file() or (path / MANIFEST).is_file()
    if arguments.build_if_missing and not has_index:
        report(f"building the index {path} over {len(corpus):,} passages")
        build_index(corpus, path, build_options(arguments))
    elif arguments.build_if_missing and path.is_dir():
        manifest = read_manifest(path)
        for name in ("kind", "factory"):
            value = getattr(arguments, name)
            if value is not None and value != manifest[name]:
                problem = f"--{name} {value}: {path} was built with {manifest[name]}"
                raise RetrieverError(f"{problem}; leave the option out, or choose another --index_path")
    report(f"loading the index {path} over {len(corpus):,} passages")
    return open_index(path, corpus, index_options(arguments))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket without Nagle's algorithm; raises RetrieverError for a taken port.

    asyncio turns it off only for its own sockets; with it, the body of a reply waited 40 ms.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]  # Python adds the address
        problem = f"cannot listen on {host}:{port} ({reason}); choose another --port or --host"
        raise RetrieverError(f"--port {port}: {problem}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """Allow HTTP only: uvicorn would open WebSockets before it asks for a token."""
    return uvicorn.Config(
        app, http=protocol, ws="none", lifespan="off", log_level="warning", access_log=False
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or until the parent process has ended; raises RetrieverError as `load`."""
    listener = listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    loading = Loading(lambda report: load(arguments, report), read_token(arguments))
    protocol = bounded_protocol(allowed_connections(arguments.max_connections), arguments.request_seconds)
    server = uvicorn.Server(make_config(loading, protocol))

    async def watch() -> None:
        try:
            await loading.wait()
        except BaseException:
            server.should_exit = True
            raise
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        sys.stdout.write(f"ready on http://{host}:{port}\n")
        sys.stdout.flush()
        if arguments.port_file:
            with atomic_write(arguments.port_file) as partial:
                partial.write_text(str(port))

    async def follow_parent() -> None:
        while os.getppid() == arguments.parent_pid:
            await asyncio.sleep(0.5)
        server.should_exit = True

    async def serve() -> None:
        tasks = [asyncio.create_task(watch())]
        if arguments.parent_pid:
            tasks.append(asyncio.create_task(follow_parent()))
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    asyncio.run(serve())
