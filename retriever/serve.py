"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import os
import sys

from retriever.errors import require, status_of
from retriever.opening import find_own_module
from retriever.options import INSTALL, parse

# Packages of the extra `retriever`, without which the service cannot start.
PACKAGES = ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "scipy")
# Variables that set the number of threads of one operation; read when NumPy, FAISS or torch is loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def run(argv: list[str] | None) -> None:
    """Serve until a signal.

    Args:
        argv: Arguments of the command line; None for those of the process.

    Raises:
        RetrieverError: An option is wrong, a package is missing, or the service cannot be loaded.
    """
    arguments = parse(argv)
    _limit_threads(is_given=arguments.threads > 0)
    for package in PACKAGES:
        require(package, INSTALL)
    find_own_module(arguments.kind)
    # Imported here: --help must answer at once, and the number of threads is set before NumPy is loaded.
    from retriever.service import server

    server.run(arguments)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return status_of(lambda: run(argv))


def _limit_threads(is_given: bool) -> None:
    """Give each operation one thread, because several searches run at the same time.

    On two busy cores, two threads encoded a query at 5 to 10 times one thread's CPU time.

    Args:
        is_given: Whether --threads was given; it wins over the environment.
    """
    # NumPy, FAISS, torch and tokenizers read these variables when loaded; nothing above imports them.
    for name in THREAD_VARIABLES:
        if is_given or name not in os.environ:
            os.environ[name] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The search of a large index has several threads, which must not spin while they wait.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    sys.exit(main())
