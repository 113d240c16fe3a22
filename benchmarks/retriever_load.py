"""Throughput of the retrieval service against a plain server, with many single-query clients.

    python -m benchmarks.retriever_load --corpus_path FILE --index_path FOLDER [--clients 64] [--seconds 10]

The plain server, in the style of Search-R1: one request, one encode and one search, in FastAPI's thread
pool. Same encoder, index and machine; the clients run in a process of their own; rounds alternate.
``--soak SECONDS`` then keeps the load on the service and reports ten times the memory it has taken for
itself (RssAnon) and what it holds of mapped files (RssFile).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel

from retriever.corpus.passages import load_corpus, split_contents
from retriever.search.opening import open_index

SLICES = 10  # of the soak


class Request(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def serve_plain(arguments: argparse.Namespace) -> None:
    import uvicorn
    from fastapi import FastAPI

    index = open_index(arguments.index_path, load_corpus(arguments.corpus_path))
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        found = index.search(request.queries, request.topk)
        return {"result": [[{"document": row, "score": score} for row, score in one] for one in found]}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False)


def queries_of(corpus: Path, count: int) -> list[str]:
    """Titles of passages spread over the corpus."""
    rows = load_corpus(corpus)
    step = max(1, len(rows) // count)
    return [split_contents(rows[number]["contents"])[0] for number in range(0, len(rows), step)][:count]


async def drive(url: str, queries: list[str], clients: int, seconds: float) -> list[float]:
    """Latencies of all requests answered within `seconds`.

    Each client keeps one connection and sends plain HTTP/1.1 over it: the pool of a general client uses
    more of the machine than the service does.
    """
    latencies: list[float] = []
    address = urlsplit(url)
    until = time.monotonic() + seconds

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while time.monotonic() < until:
            begun = time.monotonic()
            query = {"queries": [queries[number % len(queries)]], "topk": 3, "return_scores": True}
            body = json.dumps(query).encode()
            head = f"POST /retrieve HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
            length = next(int(line[15:]) for line in headers if line.startswith("content-length:"))
            reply = await reader.readexactly(length)
            if " 200 " not in status:
                raise SystemExit(f"{status}: {reply.decode()[:200]}")
            latencies.append(time.monotonic() - begun)
            number += clients
        writer.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    return latencies


def start(command: list[str], url: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command)
    while True:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return process
        except httpx.HTTPError:
            if process.poll() is not None:
                raise SystemExit(f"{command} ended") from None
            time.sleep(0.2)


def measure(url: str, queries: list[str], arguments: argparse.Namespace, seconds: float) -> list[float]:
    """Runs the clients in a process of their own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(queries, file)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.retriever_load", "--drive", url, "--queries", file.name]
        command += ["--clients", str(arguments.clients), "--seconds", str(seconds)]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def process_bytes(pid: int, field: str = "VmRSS") -> int:
    """A field of /proc/PID/status that counts memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def compare(
    arguments: argparse.Namespace, queries: list[str], urls: dict[str, str], pids: dict[str, int]
) -> str:
    """A line for each server, in rounds that alternate, and the ratio of their medians."""
    rates: dict[str, list[float]] = {name: [] for name in urls}
    latencies: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for name, url in urls.items():
            seconds = arguments.seconds if number else 2.0
            found = measure(url, queries, arguments, seconds)
            if number:
                rates[name].append(len(found) / seconds)
                latencies[name] += found
    lines = []
    for name, pid in pids.items():
        ordered = sorted(latencies[name])
        p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        rate = statistics.median(rates[name])
        line = f"{name:>8}  {rate:7.1f} queries/s  p50 {p50:.0f} ms  p99 {p99:.0f} ms"
        lines.append(f"{line}  {process_bytes(pid) / 2**20:.0f} MB resident\n")
    ratio = statistics.median(rates["service"]) / statistics.median(rates["plain"])
    return "".join(lines) + f"ratio of medians {ratio:.2f}\n"


def soak(arguments: argparse.Namespace, queries: list[str], url: str, pid: int) -> str:
    """Memory before and after each slice of a long load."""
    count = 0
    memory = {field: [process_bytes(pid, field)] for field in ("RssAnon", "RssFile")}
    for _ in range(SLICES):
        count += len(measure(url, queries, arguments, arguments.soak / SLICES))
        for field, values in memory.items():
            values.append(process_bytes(pid, field))
    lines = [f"soak {arguments.soak:.0f} s, {count} requests\n"]
    for field, values in memory.items():
        lines.append(f"{field} MB  {' '.join(f'{one / 2**20:.0f}' for one in values)}\n")
    return "".join(lines)


def run(arguments: argparse.Namespace) -> None:
    """Starts both servers, measures them and prints."""
    paths = ["--corpus_path", str(arguments.corpus_path), "--index_path", str(arguments.index_path)]
    commands = {
        "service": [sys.executable, "-m", "retriever.serve", *paths],
        "plain": [sys.executable, "-m", "benchmarks.retriever_load", "--plain", *paths],
    }
    queries = queries_of(arguments.corpus_path, 2000)
    urls = {name: f"http://127.0.0.1:{arguments.port + n}" for n, name in enumerate(commands)}
    servers = {
        name: start([*command, "--port", urls[name].rsplit(":", 1)[1]], urls[name])
        for name, command in commands.items()
    }
    try:
        pids = {name: server.pid for name, server in servers.items()}
        sys.stdout.write(compare(arguments, queries, urls, pids))
        servers["plain"].terminate()
        if arguments.soak:
            sys.stdout.write(soak(arguments, queries, urls["service"], pids["service"]))
    finally:
        for server in servers.values():
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus_path", type=Path)
    parser.add_argument("--index_path", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--queries", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        serve_plain(arguments)
        return
    if arguments.drive:
        queries = json.loads(arguments.queries.read_text())
        latencies = asyncio.run(drive(arguments.drive, queries, arguments.clients, arguments.seconds))
        sys.stdout.write(json.dumps(latencies))
        return
    run(arguments)


if __name__ == "__main__":
    main()
