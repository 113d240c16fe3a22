"""Connections that no client should make, against a running service: what it holds of memory, and whether it
answers meanwhile.

    python -m benchmarks.retrieval.flood --corpus_path FILE --index_path FOLDER

Starts a service with a token. Then, each while a real client asks once in a while: idle connections, slow
ones (a byte of the head or of the body now and then), large bodies without the token and with it, and one in
small parts. Prints for each the seconds that the real client waited at most, and the service's own memory
(RssAnon) before and at its most.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.retrieval.load import make_parser, process_bytes

TOKEN = "of-the-flood"
HEAD = "POST /retrieve HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"


@dataclass
class Outcome:
    """Effect of one flood on a real client and on the service's memory."""

    name: str
    answers: int  # of the real client
    longest: float  # seconds it waited for one
    before: int  # bytes
    peak: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.answers} answers, the longest after {self.longest:.2f} s;"
            f" {self.before / 2**20:.0f} MB before, {self.peak / 2**20:.0f} MB at most"
        )


@contextlib.contextmanager
def service(corpus: Path, index: Path, *options: str) -> Iterator[tuple[tuple[str, int], int]]:
    """Start a service with a token; yield its address and process id."""
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        command = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus)]
        command += ["--index_path", str(index), "--port", "0", "--port_file", str(port), *options]
        environment = dict(os.environ, RETRIEVER_TOKEN=TOKEN)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            while not port.is_file():
                if process.poll() is not None:
                    raise SystemExit("the service ended")
                time.sleep(0.05)
            yield ("127.0.0.1", int(port.read_text())), process.pid
        finally:
            process.terminate()
            process.wait()


def watch(name: str, address: tuple[str, int], pid: int, flood: Callable[[], None]) -> Outcome:
    """Run a flood while a real client sends queries, and record the service's memory."""
    url = f"http://{address[0]}:{address[1]}/retrieve"
    header = {"Authorization": f"Bearer {TOKEN}"}
    ended, waits, before = threading.Event(), [], process_bytes(pid, "RssAnon")
    memory, failures = [before], []

    def ask() -> None:
        with httpx.Client(trust_env=False, timeout=60, headers=header) as http:
            while not ended.is_set():
                begun = time.monotonic()
                reply = None
                while reply is None and time.monotonic() < begun + 60:
                    # a connection that has not sent its request yet may be closed: clients try again
                    with contextlib.suppress(httpx.TransportError):
                        reply = http.post(url, json={"queries": ["who was it"], "topk": 1})
                if reply is None or reply.status_code != 200 or len(reply.json()["result"]) != 1:
                    failures.append(reply.text if reply else "no answer in 60 s")
                waits.append(time.monotonic() - begun)
                memory.append(process_bytes(pid, "RssAnon"))
                time.sleep(0.05)

    client = threading.Thread(target=ask)
    client.start()
    try:
        flood()
    finally:
        ended.set()
        client.join()
    if failures or not waits:
        raise SystemExit(f"{name}: the service did not answer: {failures[:1]}")
    return Outcome(name, len(waits), max(waits), before, max(memory))


def idle(address: tuple[str, int], count: int, seconds: float) -> None:
    """Hold connections that never send anything."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(address))
        time.sleep(seconds)


def slow(address: tuple[str, int], count: int, seconds: float) -> None:
    """Send half of the heads, and half of the bodies with the token, byte by byte."""
    head = f"{HEAD}authorization: Bearer {TOKEN}\r\ncontent-length: 1000\r\n".encode()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(count)]
        for number, connection in enumerate(connections):
            connection.sendall(head if number % 2 else head + b"\r\n")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for connection in connections:
                with contextlib.suppress(OSError):  # closed by the service
                    connection.sendall(b"x")
            time.sleep(0.5)


def bodies(address: tuple[str, int], count: int, size: int, token: str = "", part: int = 2**16) -> None:
    """Send bodies at the same time, all but their last byte, and hold them for a moment."""
    header = f"authorization: Bearer {token}\r\n" if token else ""
    head = f"{HEAD}{header}content-length: {size}\r\n\r\n".encode()

    def send() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address) as connection:
            connection.settimeout(20)
            connection.sendall(head)
            for _ in range(size // part - 1):
                connection.sendall(b" " * part)
            time.sleep(1.0)

    threads = [threading.Thread(target=send) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--bodies", type=int, default=40)
    parser.add_argument("--size", type=int, default=15 * 10**6, help="number of bytes of a body")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds for which connections are held")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with service(arguments.corpus_path, arguments.index_path) as (address, pid):
        bodies(address, 2, arguments.size, TOKEN)  # buffers of a first large body stay
        outcomes = [
            watch(name, address, pid, flood)
            for name, flood in (
                (
                    f"{arguments.idle} idle connections",
                    lambda: idle(address, arguments.idle, arguments.seconds),
                ),
                (
                    f"{arguments.slow} slow connections",
                    lambda: slow(address, arguments.slow, arguments.seconds),
                ),
                (
                    f"{arguments.bodies} bodies without token",
                    lambda: bodies(address, arguments.bodies, arguments.size),
                ),
                (
                    f"{arguments.bodies} bodies with token",
                    lambda: bodies(address, arguments.bodies, arguments.size, TOKEN),
                ),
                ("a body in parts of 1 KB", lambda: bodies(address, 1, arguments.size, TOKEN, 1024)),
            )
        ]
    for outcome in outcomes:
        sys.stdout.write(f"{outcome}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=2))


if __name__ == "__main__":
    main()
