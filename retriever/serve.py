"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import os
import sys

from retriever.errors import require, status_of
from retriever.options import INSTALL, parse


def run(argv: list[str] | None) -> None:
    arguments = parse(argv)
    _limit_threads(is_asked=arguments.threads > 0)
    for package in ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "scipy"):
        require(package, INSTALL)
    from retriever.service import server

    server.run(arguments)


def main(argv: list[str] | None = None) -> int:
    return status_of(lambda: run(argv))


def _limit_threads(is_asked: bool) -> None:
    """Set one thread for each operation: searches run beside each other. --threads wins over the environment.

    On two busy cores two threads encoded a query at 5 to 10 times one thread's CPU time.
    """
    # Read when numpy, FAISS, torch and tokenizers are loaded: nothing above imports them.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        if is_asked or name not in os.environ:
            os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # the search of a large index has several threads


if __name__ == "__main__":
    sys.exit(main())
