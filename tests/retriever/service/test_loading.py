"""What the service answers before its index is there, and when it never will be."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

import httpx

from retriever.errors import RetrieverError
from retriever.options import parse
from retriever.service.app import make_app
from retriever.service.engine import Depths, index_identity
from retriever.service.server import Loading, run


class Empty:
    manifest = {"documents": 0}

    def search(self, queries, k):
        return [[] for _ in queries]


def test_it_says_what_it_loads_and_then_hands_over():
    go_on = threading.Event()

    def load(report):
        report("reading the corpus")
        go_on.wait(30)
        return make_app(Empty(), Depths(3))

    async def ask():
        loading = Loading(load)
        transport = httpx.ASGITransport(loading)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            waiting = asyncio.create_task(loading.wait())
            while (reply := await client.get("/health")).json()["stage"] == "starting":
                await asyncio.sleep(0.01)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "5"
            assert reply.json()["status"] == "loading" and reply.json()["stage"] == "reading the corpus"
            early = await client.post("/retrieve", json={"queries": ["q"]})
            assert early.status_code == 503
            assert "not ready yet: reading the corpus" in early.json()["error"]
            go_on.set()
            await waiting
            ready = (await client.get("/health")).json()
            identity = index_identity(Empty.manifest, "")
            assert ready == {"status": "ready", "documents": 0, "reranker": "", "identity": identity}
            assert (await client.post("/retrieve", json={"queries": ["q"]})).json() == {"result": [[]]}

    asyncio.run(ask())


def test_while_it_loads_only_the_token_learns_what():
    async def ask():
        loading = Loading(lambda report: None, "secret")
        transport = httpx.ASGITransport(loading)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            for route in ("/retrieve", "/metrics", "/nothing"):
                assert (await client.post(route)).status_code == 401
            refused = await client.post("/retrieve", headers={"Authorization": "Bearer other"})
            assert refused.status_code == 401 and "starting" not in refused.text
            early = await client.post("/retrieve", headers={"Authorization": "Bearer secret"})
            assert early.status_code == 503 and "starting" in early.json()["error"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/health")).status_code == 401

    asyncio.run(ask())


def command(folder, *more):
    base = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(folder / "corpus.jsonl")]
    return [*base, "--index_path", str(folder / "index"), "--port", "0", *more]


@pytest.mark.medium
def test_what_cannot_be_loaded_ends_the_service(tmp_path):
    ended = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "corpus.jsonl" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.medium
def test_a_stop_while_loading_does_not_wait_for_it(tmp_path):
    """Building over so many passages takes far longer than the test waits."""
    rows = (json.dumps({"id": str(n), "contents": f'"T {n}"\nword{n} ' * 20}) for n in range(200_000))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [*command(tmp_path), "--build_if_missing", "--port", port], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False)
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        assert reply.status_code == 503 and reply.json()["status"] == "loading"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert not (tmp_path / "index" / "manifest.json").exists()
    finally:
        process.kill()


def test_a_taken_port_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ["--corpus_path", "c", "--index_path", "i", "--port", port]
        with pytest.raises(RetrieverError, match=f"--port {port}: cannot listen on 127.0.0.1"):
            run(parse(options))
