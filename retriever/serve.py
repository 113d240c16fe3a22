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
    parser.add_argument("--index_path", type=Path, required=True, help="folder of the index, or a FAISS file")
    parser.add_argument("--build_if_missing", action="store_true", help="build the index first")
    parser.add_argument(
        "--retriever_name", default="", help="hashed, e5, bge, dense, bm25; default: the index's"
    )
    parser.add_argument("--retriever_model", default="", help="folder or hub name of the encoder's model")
    parser.add_argument("--faiss_gpu", action="store_true", help="spread the index over all GPUs in fp16")
    parser.add_argument("--mmap", action="store_true", help="read the index from disk as it is needed")
    parser.add_argument(
        "--engine", default="", choices=["", "faiss", "jax"], help="what searches a flat index"
    )
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

    from retriever.errors import RetrieverError
    from retriever.index import open_index
    from retriever.service import make_app

    try:
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
