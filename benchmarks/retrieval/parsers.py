"""The retrieval service over h11, which bounds heads, and over httptools, which does not.

    python -m benchmarks.retrieval.parsers --corpus_path FILE --index_path FOLDER [--clients 64] [--seconds 4]

Both servers run at the same time, with one index; rounds alternate between them. For each: queries/s (median
of the rounds), latencies, CPU milliseconds a query and memory, as `benchmarks.retrieval.load`; then what h11
gives of httptools' queries/s, and what it costs. Over httptools the limits on connections are gone, too.
"""

from __future__ import annotations

import argparse
import sys

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from benchmarks.retrieval.load import compare, make_parser, queries_of, start
from retriever.serve import main as serve
from retriever.service import server


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--port", type=int, default=8251)
    parser.add_argument("--httptools", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    paths = ["--corpus_path", str(arguments.corpus_path), "--index_path", str(arguments.index_path)]
    if arguments.httptools:
        server.bounded_protocol = lambda *_: HttpToolsProtocol  # type: ignore[assignment, attr-defined]
        sys.exit(serve([*paths, "--port", str(arguments.port)]))
    commands = {
        "h11": [sys.executable, "-m", "retriever.serve", *paths],
        "httptools": [sys.executable, "-m", "benchmarks.retrieval.parsers", "--httptools", *paths],
    }
    ports = {name: arguments.port + number for number, name in enumerate(commands)}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    servers = {
        name: start([*command, "--port", str(ports[name])], urls[name]) for name, command in commands.items()
    }
    try:
        pids = {name: server.pid for name, server in servers.items()}
        table = compare(arguments, queries_of(arguments.corpus_path, 2000), urls, pids)
    finally:
        for running in servers.values():
            running.terminate()
            running.wait()
    for name, row in table.items():
        sys.stdout.write(f"{name:>9}  {'  '.join(f'{key} {value:g}' for key, value in row.items())}\n")
    for key in ("queries/s", "CPU ms/query"):
        sys.stdout.write(f"h11 / httptools, {key}: {table['h11'][key] / table['httptools'][key]:.2f}\n")


if __name__ == "__main__":
    main()
