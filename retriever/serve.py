"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


def main(argv: list[str] | None = None) -> int:
    from retriever.errors import RetrieverError
    from retriever.options import parse

    try:
        arguments = parse(argv)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, str(arguments.threads))
        app = load(arguments)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    run(app, arguments)
    return 0


def load(arguments: argparse.Namespace) -> Any:
    """The application over what the options name.

    Raises:
        RetrieverError: something is missing, damaged, too large, or does not belong together.
    """
    from retriever.cache import ResultCache
    from retriever.index import open_index
    from retriever.options import read_token
    from retriever.pages import Pages
    from retriever.rerank import Reranker
    from retriever.service import Limits, make_app

    token = read_token(arguments)
    if arguments.host not in ("127.0.0.1", "localhost", "::1") and not token:
        sys.stderr.write(f"warning: {arguments.host} is open to the network without --token_file\n")
    index = open_index(
        arguments.index_path,
        arguments.corpus_path,
        name=arguments.retriever_name,
        model=arguments.retriever_model,
        faiss_gpu=arguments.faiss_gpu,
        mmap=arguments.mmap,
        engine=arguments.engine,
        build_if_missing=arguments.build_if_missing,
    )
    reranker = None
    if arguments.reranker_model:
        reranker = Reranker(arguments.reranker_model, arguments.reranker_batch_size)
    cache = None
    if arguments.cache_path is not None:
        cache = ResultCache(arguments.cache_path, index.manifest, arguments.cache_mode)
    return make_app(
        index,
        arguments.retrieval_topk,
        rerank_topk=arguments.reranking_topk,
        reranker=reranker,
        cache=cache,
        pages=None if arguments.pages_path is None else Pages(arguments.pages_path),
        limits=Limits(max_batch=arguments.max_batch, max_queue=arguments.max_queue),
        token=token,
    )


def run(app: Any, arguments: argparse.Namespace) -> None:
    """Serves until a signal, or until the parent process has ended."""
    import asyncio
    import socket

    import uvicorn

    listener = socket.create_server((arguments.host, arguments.port))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        sys.stdout.write(f"ready on http://{arguments.host}:{port}\n")
        sys.stdout.flush()
        if arguments.port_file:
            unfinished = arguments.port_file.with_suffix(".unfinished")
            unfinished.write_text(str(port))
            os.replace(unfinished, arguments.port_file)
        while arguments.parent_pid and os.getppid() == arguments.parent_pid:
            await asyncio.sleep(0.5)
        if arguments.parent_pid:
            server.should_exit = True

    async def serve() -> None:
        watching = asyncio.create_task(watch())
        await server.serve(sockets=[listener])
        watching.cancel()

    asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main())
