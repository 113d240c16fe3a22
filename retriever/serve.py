"""``python -m retriever.serve --corpus_path FILE --index_path FOLDER``: the retrieval service."""

from __future__ import annotations

import os
import sys

from retriever.errors import RetrieverError, require
from retriever.options import INSTALL, parse


def main(argv: list[str] | None = None) -> int:
    try:
        arguments = parse(argv)
        if arguments.threads:
            # Read when numpy, FAISS and torch are loaded: nothing above imports them.
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ[name] = str(arguments.threads)
        for package in ("fastapi", "uvicorn", "prometheus_client", "scipy"):
            require(package, INSTALL)
        from retriever.service.server import run

        run(arguments)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
