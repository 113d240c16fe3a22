"""The running service: put together from its options, loaded beside its socket, ended by a signal."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse

from retriever.backends import find_remote, load_object
from retriever.corpus.pages import Pages
from retriever.corpus.passages import load_corpus
from retriever.encoders.dense import Reranker
from retriever.errors import RetrieverError
from retriever.files import replacing
from retriever.indexes.building import build_index
from retriever.indexes.opening import Index, open_index
from retriever.indexes.storage import available_cores, is_index, read_manifest
from retriever.interfaces import Searcher
from retriever.options import build_options, index_options, read_token
from retriever.service.app import RequireToken, make_app
from retriever.service.cache import ResultCache
from retriever.service.connections import allowed_connections, bounded_protocol
from retriever.service.engine import Depths, Limits

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
    if (kind := find_remote(arguments)) and kind.remote:
        report(f"opening {kind.remote.searcher}")
        searcher = load_object(kind.remote.searcher)(arguments)
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
        arguments.max_batch,
        arguments.max_queue,
        arguments.max_queries,
        arguments.max_results,
        request_seconds=arguments.request_seconds,
        workers=_workers(arguments),
    )
    depths = Depths(arguments.retrieval_topk, arguments.reranking_topk)
    return make_app(searcher, depths, reranker=reranker, cache=cache, pages=pages, limits=limits, token=token)


def _workers(arguments: argparse.Namespace) -> int:
    """Searches at the same time: one for each core, unless the kind says otherwise."""
    kind = find_remote(arguments)
    if kind and kind.remote and kind.remote.workers:
        return kind.remote.workers
    return arguments.threads or max(1, available_cores() // int(os.environ.get("OMP_NUM_THREADS") or 1))


def load_index(arguments: argparse.Namespace, report: ReportStage) -> Index:
    """Open the index over its corpus, built first if missing; raises RetrieverError if it does not fit."""
    path = arguments.index_path
    report(f"reading the corpus {arguments.corpus_path}")
    corpus = load_corpus(arguments.corpus_path)
    if arguments.build_if_missing and not is_index(path):
        report(f"building the index {path} over {len(corpus):,} passages")
        build_index(corpus, path, build_options(arguments))
    elif arguments.build_if_missing and path.is_dir():
        manifest = read_manifest(path)
        for name in ("kind", "factory"):
            value = getattr(arguments, name)
            if value is not None and value != manifest[name]:
                raise RetrieverError(
                    f"--{name} {value}: {path} was built with {manifest[name]}; leave the option out, or"
                    " choose another --index_path"
                )
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
    except OSError as error:
        raise RetrieverError(f"--port {port}: cannot listen on {host}:{port} ({error.strerror})") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """Allow HTTP only: uvicorn would open WebSockets before it asks for a token."""
    return uvicorn.Config(
        app, http=protocol, ws="none", log_level="warning", access_log=False, lifespan="off"
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
            with replacing(arguments.port_file) as partial:
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
