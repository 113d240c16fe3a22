"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m retriever.serve", description=__doc__)
    parser.add_argument("--corpus_path", type=Path, required=True, help="JSONL of {id, contents}, or .gz")
    parser.add_argument("--index_path", type=Path, required=True, help="folder of the index")
    parser.add_argument("--build_if_missing", action="store_true", help="build the index first")
    parser.add_argument("--retriever_name", default="hashed", help="encoder of a built index")
    parser.add_argument("--retrieval_topk", type=int, default=3, help="documents where a request names none")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--port_file", type=Path, help="written with the port once the service is ready")
    parser.add_argument("--parent_pid", type=int, help="stop when this process has ended")
    parser.add_argument("--threads", type=int, default=1, help="threads of one search (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(arguments.threads))

    from retriever.corpus import load_corpus
    from retriever.errors import RetrieverError
    from retriever.index import MANIFEST, build_index, import_faiss, load_index
    from retriever.service import make_app

    try:
        import_faiss().omp_set_num_threads(arguments.threads)
        corpus = load_corpus(arguments.corpus_path)
        if arguments.build_if_missing and not (arguments.index_path / MANIFEST).is_file():
            build_index(corpus, arguments.index_path, arguments.retriever_name)
        index = load_index(arguments.index_path, corpus)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    run(make_app(index, arguments.retrieval_topk), arguments)
    return 0


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
