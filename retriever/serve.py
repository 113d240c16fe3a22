"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = Callable[[str], None]  # told what is being done


def main(argv: list[str] | None = None) -> int:
    from retriever.errors import RetrieverError
    from retriever.options import parse

    try:
        arguments = parse(argv)
        if arguments.threads:
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ.setdefault(name, str(arguments.threads))
        run(arguments)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def load(arguments: argparse.Namespace, report: Report = lambda _: None) -> Any:
    """The application over what the options name.

    Raises:
        RetrieverError: something is missing, damaged, too large, or does not belong together.
    """
    from retriever.cache import ResultCache
    from retriever.options import read_token
    from retriever.pages import Pages
    from retriever.rerank import Reranker
    from retriever.service import Limits, make_app

    token = read_token(arguments)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.stderr.write(f"warning: {arguments.host} is open to the network without --token_file\n")
    searcher = _open_searcher(arguments, report)
    reranker = None
    if arguments.reranker_model:
        report("loading the reranker")
        reranker = Reranker(arguments.reranker_model, arguments.reranker_batch_size)
    cache = None
    if arguments.cache_path is not None:
        cache = ResultCache(arguments.cache_path, searcher.manifest, arguments.cache_mode)
    pages = None
    if arguments.pages_path is not None:
        report("reading the pages")
        pages = Pages(arguments.pages_path)
    return make_app(
        searcher,
        arguments.retrieval_topk,
        rerank_topk=arguments.reranking_topk,
        reranker=reranker,
        cache=cache,
        pages=pages,
        limits=Limits(max_batch=arguments.max_batch, max_queue=arguments.max_queue),
        token=token,
    )


def _open_searcher(arguments: argparse.Namespace, report: Report) -> Any:
    from retriever.web_search import PROVIDERS, Budget, WebSearch

    if arguments.retriever_name in PROVIDERS:
        spent = Path(f"{arguments.cache_path}.budget")
        budget = Budget(spent, arguments.web_budget)
        return WebSearch(arguments.retriever_name, budget, arguments.web_endpoint)
    from retriever.index import open_index

    return open_index(
        arguments.index_path,
        arguments.corpus_path,
        name=arguments.retriever_name,
        model=arguments.retriever_model,
        faiss_gpu=arguments.faiss_gpu,
        mmap=arguments.mmap,
        engine=arguments.engine,
        build_if_missing=arguments.build_if_missing,
        report=report,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once.

    asyncio turns Nagle's algorithm off only for sockets it has made itself; with it, the body of every
    reply waited 40 ms for the client's acknowledgement of the head.

    Raises:
        RetrieverError: the port is taken.
    """
    from retriever.errors import RetrieverError

    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise RetrieverError(
            f"--port {port}: {host} does not give it ({error.strerror}); choose another"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run(arguments: argparse.Namespace) -> None:
    """Serves until a signal, or until the parent process has ended; says what it loads meanwhile.

    Raises:
        RetrieverError: the port is taken, or as `load`.
    """
    import asyncio

    import uvicorn

    from retriever.loading import Loading

    listener = listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    loading = Loading(lambda report: load(arguments, report))
    server = uvicorn.Server(uvicorn.Config(loading, log_level="warning", access_log=False, lifespan="off"))

    async def watch() -> None:
        try:
            await loading.wait()
        except BaseException:
            server.should_exit = True
            raise
        sys.stdout.write(f"ready on http://{arguments.host}:{port}\n")
        sys.stdout.flush()
        if arguments.port_file:
            unfinished = arguments.port_file.with_suffix(".unfinished")
            unfinished.write_text(str(port))
            os.replace(unfinished, arguments.port_file)

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


if __name__ == "__main__":
    sys.exit(main())
