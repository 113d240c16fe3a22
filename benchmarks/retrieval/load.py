"""Load on the retrieval service and on a plain server, idle and beside a training.

    python -m benchmarks.retrieval.load --corpus_path FILE --index_path FOLDER [--clients 64] [--seconds 10]
        [--beside "COMMAND"] [--variant NAME="OPTIONS OF THE SERVICE"] [--json FILE]

The plain server is in the style of Search-R1's: a FastAPI route in threads; a request is one encode, with
transformers alone and without a lock, and one search. Same model, index and machine; the clients run in a
process of their own, one query a request; rounds alternate between the servers. ``--beside`` repeats them
while COMMAND runs, over and over, as a trainer would. For each server: queries/s (median of the rounds), p50
and p99 of all requests, CPU milliseconds a query (user and system, of the server's processes), memory.

Then the encoder alone, at several batch sizes: the bound of any server on this machine. Before all, the
documents of both servers are compared. ``--soak SECONDS`` keeps the load on the service and reports ten
times its own memory (RssAnon) and what it holds of mapped files (RssFile).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from pydantic import BaseModel

from retriever.corpus.passages import load_corpus, split_contents
from retriever.encoders.dense import DenseEncoder
from retriever.indexes.index import DenseRanker, Index, open_index
from retriever.indexes.resources import available_cores

SLICES = 10  # of the soak


class Request(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def plain_encoder(index: Index) -> Callable[[list[str]], np.ndarray]:
    """Return a function from queries to float32 [Q, D], as Search-R1's server encodes."""
    encoder = ranker(index).encoder
    if not isinstance(encoder, DenseEncoder):
        return encoder.encode_queries
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder.model)
    network = AutoModel.from_pretrained(encoder.model).eval()

    @torch.no_grad()
    def encode(queries: list[str]) -> np.ndarray:
        inputs = tokenizer(queries, max_length=256, padding=True, truncation=True, return_tensors="pt")
        states, mask = network(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        means = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=-1).numpy()

    return encode


def serve_plain(arguments: argparse.Namespace) -> None:
    import uvicorn
    from fastapi import FastAPI

    corpus = load_corpus(arguments.corpus_path)
    index = open_index(arguments.index_path, corpus)
    encode, vectors = plain_encoder(index), ranker(index)._vectors
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: Request) -> dict[str, Any]:
        scores, ids = vectors.nearest(encode(request.queries), request.topk)
        pairs = [zip(*row, strict=True) for row in zip(ids.tolist(), scores.tolist(), strict=True)]
        return {"result": [[{"document": corpus[i], "score": score} for i, score in row] for row in pairs]}

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(app, port=arguments.port, log_level="warning", access_log=False)


def ranker(index: Index) -> DenseRanker:
    """Return encoder and vectors of an index that has them."""
    if not isinstance(index._ranker, DenseRanker):
        raise SystemExit("--index_path: this benchmark is for encoders, not for BM25")
    return index._ranker


def encoder_bound(arguments: argparse.Namespace, queries: list[str]) -> list[str]:
    """Return queries/s of the encoder alone, by batch size: in one thread, and in a thread a core."""
    cores = available_cores()
    encoder = ranker(open_index(arguments.index_path, load_corpus(arguments.corpus_path))).encoder
    lines = []
    for size in (1, 8, 16, 32, 64):
        rates = []
        for threads in (1, cores):
            batches = [random.sample(queries, size) for _ in range(64)]
            until = time.monotonic() + arguments.seconds / 4

            def work(batches: list[list[str]] = batches, until: float = until) -> int:
                done = 0
                while time.monotonic() < until:
                    encoder.encode_queries(batches[done % len(batches)])
                    done += 1
                return done

            with ThreadPoolExecutor(threads) as pool:
                begun, used = time.monotonic(), time.process_time()
                done = sum(future.result() for future in [pool.submit(work) for _ in range(threads)])
                seconds = time.monotonic() - begun
                used = time.process_time() - used
            rates.append(
                f"{done * size / seconds:.0f} queries/s ({1000 * used / max(1, done * size):.1f} ms CPU)"
            )
        lines.append(f"encoder, batches of {size:2}: one thread {rates[0]}, {cores} threads {rates[1]}\n")
    return lines


def queries_of(corpus: Path, count: int) -> list[str]:
    """Return titles of passages spread over the corpus."""
    rows = load_corpus(corpus)
    step = max(1, len(rows) // count)
    return [split_contents(rows[number]["contents"])[0] for number in range(0, len(rows), step)][:count]


async def drive(url: str, queries: list[str], clients: int, seconds: float) -> list[float]:
    """Return latencies of all requests answered within `seconds`.

    Each client keeps one connection and sends plain HTTP/1.1 over it: the pool of a general client uses
    more of the machine than the service does.
    """
    latencies: list[float] = []
    address = urlsplit(url)
    until = time.monotonic() + seconds

    async def client(number: int) -> None:
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

    await asyncio.gather(*(client(number) for number in range(clients)))
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
    """Run the clients in a process of their own; return the latencies."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(queries, file)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.retrieval.load", "--drive", url, "--queries", file.name]
        command += ["--clients", str(arguments.clients), "--seconds", str(seconds)]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def process_bytes(pid: int, field: str = "VmRSS") -> int:
    """Return a field of /proc/PID/status that counts memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process with its threads, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Load:
    """What the rounds of one server gave."""

    rates: list[float] = field(default_factory=list)  # queries/s, a round each
    latencies: list[float] = field(default_factory=list)  # seconds, of all requests
    cpu: float = 0.0  # seconds

    def row(self, pid: int) -> dict[str, float]:
        ordered = sorted(self.latencies)
        p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        return {
            "queries/s": round(statistics.median(self.rates), 1),
            "p50 ms": round(p50),
            "p99 ms": round(p99),
            "CPU ms/query": round(1000 * self.cpu / len(ordered), 2),
            "MB": round(process_bytes(pid) / 2**20),
        }


def compare(
    arguments: argparse.Namespace, queries: list[str], urls: dict[str, str], pids: dict[str, int]
) -> dict[str, dict[str, float]]:
    """Return a row for each server, of rounds that alternate."""
    loads = {name: Load() for name in urls}
    for number in range(arguments.rounds + 1):  # the first one warms up
        for name, url in urls.items():
            seconds, used = arguments.seconds if number else 2.0, cpu_seconds(pids[name])
            figures = measure(url, queries, arguments, seconds)
            if number:
                loads[name].rates.append(len(figures) / seconds)
                loads[name].latencies += figures
                loads[name].cpu += cpu_seconds(pids[name]) - used
    return {name: load.row(pids[name]) for name, load in loads.items()}


@contextmanager
def beside(command: str) -> Iterator[None]:
    """Run a command over and over, in a process group of its own.

    Raises:
        SystemExit: the command failed, so that nothing ran beside the load.
    """
    if not command:
        yield
        return
    loop = f"while {command}; do :; done"
    process = subprocess.Popen(
        ["bash", "-c", loop],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(20)  # imports and compiles
        yield
        if process.poll() is not None:
            raise SystemExit(f"--beside: {command!r} failed; run it alone to see why")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def same_documents(urls: dict[str, str], queries: list[str]) -> str:
    """Count the queries that get the same ids in the same order from every server."""
    with httpx.Client(trust_env=False, timeout=120) as http:
        body = {"queries": queries, "topk": 3, "return_scores": True}
        replies = [http.post(f"{url}/retrieve", json=body).json()["result"] for url in urls.values()]
    ids = [[[item["document"]["id"] for item in hits] for hits in reply] for reply in replies]
    equal = sum(all(reply[n] == ids[0][n] for reply in ids) for n in range(len(queries)))
    return f"identical documents: {equal} of {len(queries)} queries\n"


def soak(arguments: argparse.Namespace, queries: list[str], url: str, pid: int) -> str:
    """Return memory before and after each slice of a long load."""
    count = 0
    memory = {name: [process_bytes(pid, name)] for name in ("RssAnon", "RssFile")}
    for _ in range(SLICES):
        count += len(measure(url, queries, arguments, arguments.soak / SLICES))
        for name, values in memory.items():
            values.append(process_bytes(pid, name))
    lines = [f"soak {arguments.soak:.0f} s, {count} requests\n"]
    for name, values in memory.items():
        lines.append(f"{name} MB  {' '.join(f'{value / 2**20:.0f}' for value in values)}\n")
    return "".join(lines)


def run(arguments: argparse.Namespace) -> None:
    """Start the servers, measure them and print."""
    paths = ["--corpus_path", str(arguments.corpus_path), "--index_path", str(arguments.index_path)]
    commands = {
        "service": [sys.executable, "-m", "retriever.serve", *paths],
        "plain": [sys.executable, "-m", "benchmarks.retrieval.load", "--plain", *paths],
    }
    for variant in arguments.variant:
        name, _, options = variant.partition("=")
        commands[name] = [*commands["service"], *shlex.split(options)]
    queries = queries_of(arguments.corpus_path, 2000)
    urls = {name: f"http://127.0.0.1:{arguments.port + n}" for n, name in enumerate(commands)}
    servers = {
        name: start([*command, "--port", urls[name].rsplit(":", 1)[1]], urls[name])
        for name, command in commands.items()
    }
    tables = {}
    try:
        pids = {name: server.pid for name, server in servers.items()}
        sys.stdout.write(same_documents(urls, queries[:200]))
        for condition, command in (("idle", ""), ("beside a training", arguments.beside)):
            if condition != "idle" and not command:
                continue
            with beside(command):
                tables[condition] = table = compare(arguments, queries, urls, pids)
            sys.stdout.write(f"{condition}\n")
            for name, row in table.items():
                sys.stdout.write(
                    f"{name:>9}  {'  '.join(f'{key} {value:g}' for key, value in row.items())}\n"
                )
            for key in ("queries/s", "CPU ms/query"):
                ratio = table["service"][key] / table["plain"][key]
                sys.stdout.write(f"service / plain, {key}: {ratio:.2f}\n")
            sys.stdout.flush()
        if arguments.soak:
            sys.stdout.write(soak(arguments, queries, urls["service"], pids["service"]))
    finally:
        for server in servers.values():
            server.terminate()
            server.wait()
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=2))
    bound = [sys.executable, "-m", "benchmarks.retrieval.load", "--bound", *paths]
    bound += ["--seconds", str(arguments.seconds)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    subprocess.run(bound, check=True, env=environment)


def make_parser(description: str | None, is_required: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of one corpus and its index."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus_path", type=Path, required=is_required)
    parser.add_argument("--index_path", type=Path, required=is_required)
    return parser


def main() -> None:
    parser = make_parser(__doc__, is_required=False)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--beside", default="", help="command that trains; all rounds are repeated beside it")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help='other options of the service, such as one="--threads 1"',
    )
    parser.add_argument("--json", type=Path, help="also write the tables to this JSON file")
    parser.add_argument("--bound", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--queries", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        serve_plain(arguments)
        return
    if arguments.bound:
        queries = queries_of(arguments.corpus_path, 2000)
        sys.stdout.write("".join(encoder_bound(arguments, queries)))
        return
    if arguments.drive:
        queries = json.loads(arguments.queries.read_text())
        latencies = asyncio.run(drive(arguments.drive, queries, arguments.clients, arguments.seconds))
        sys.stdout.write(json.dumps(latencies))
        return
    run(arguments)


if __name__ == "__main__":
    main()
