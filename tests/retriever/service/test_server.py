"""The running service: assembled from its options, loading, its end."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import faiss
import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from retriever_rig import refuses, served

from retriever.options import parse
from retriever.service import server as assembly
from retriever.service.app import index_identity, make_app
from retriever.service.server import Loading, listen, load, load_index, run


def command(corpus, folder, *more):
    base = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus)]
    return [*base, "--index_path", str(folder), "--port", "0", *more]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "localhost"])
def test_addresses_of_both_families(host):
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        for address in ("::1", "127.0.0.1") if host == "::" else (host,):
            with socket.create_connection((address, listener.getsockname()[1])):
                accepted, _ = listener.accept()
                with accepted:  # it sends at once
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


EMPTY = SimpleNamespace(manifest={"documents": 0}, search=lambda queries, k: [[] for _ in queries])


def test_loading_is_reported_before_the_service():
    """Without the token by /health only."""
    go_on, token = threading.Event(), {"Authorization": "Bearer secret"}

    def load(report):
        report("reading the corpus")
        go_on.wait(30)
        return make_app(EMPTY, 3)

    async def ask():
        loading = Loading(load, "secret")
        transport = httpx.ASGITransport(loading)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            waiting = asyncio.create_task(loading.wait())
            while (reply := await client.get("/health")).json()["stage"] == "starting":
                await asyncio.sleep(0.01)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "5"
            assert reply.json()["status"] == "loading" and reply.json()["stage"] == "reading the corpus"
            for route in ("/retrieve", "/metrics", "/nothing", "/health"):
                refused = await client.post(route, headers={"Authorization": "Bearer other"})
                assert refused.status_code == 401 and "reading" not in refused.text
            early = await client.post("/retrieve", headers=token)
            assert early.status_code == 503 and "not ready yet: reading the corpus" in early.json()["error"]
            go_on.set()
            await waiting
            ready = (await client.get("/health")).json()
            identity = index_identity(EMPTY.manifest, "")
            assert ready == {"status": "ready", "documents": 0, "reranker": "", "identity": identity}
            assert (await client.post("/retrieve", json={"queries": ["q"]})).json() == {"result": [[]]}

    asyncio.run(ask())


@pytest.mark.medium
def test_failed_loading_ends_the_service(tmp_path):
    call = command(tmp_path / "corpus.jsonl", tmp_path / "index")
    ended = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert re.fullmatch("error: .*corpus.jsonl.*\n", ended.stderr)


@pytest.mark.medium
def test_stop_does_not_wait_for_loading(tmp_path):
    """Building over so many passages takes far longer than the test waits."""
    rows = (json.dumps({"id": str(n), "contents": f'"T {n}"\nword{n} ' * 20}) for n in range(200_000))
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    call = command(tmp_path / "corpus.jsonl", tmp_path / "index", "--build_if_missing", "--port", port)
    process = subprocess.Popen(call, stderr=subprocess.DEVNULL)
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


def test_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        options = ["--corpus_path", "c", "--index_path", "i", "--port", port]
        refuses(f"--port {port}: cannot listen on 127.0.0.1", run, parse(options))


def test_options_reach_the_service(files, tmp_path, capsys):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(files[1]), "--host", "0.0.0.0"]
    arguments += ["--retrieval_topk", "5", "--reranking_topk", "2", "--max_queries", "4", "--engine", "jax"]
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"url": "u", "contents": "a page"}\n')
    with TestClient(load(parse([*arguments, "--pages_path", str(pages)]))) as client:
        assert client.post("/access", json={"urls": ["u"]}).json()["result"][0]["contents"] == "a page"
        (five,) = client.post("/retrieve", json={"queries": ["ada dorn"]}).json()["result"]
        body = {"queries": ["ada dorn"], "topk_retrieval": 5, "not_sort": True}
        (two,) = client.post("/retrieve", json=body).json()["result"]
        assert (len(five), len(two)) == (5, 2)
        assert client.post("/retrieve", json={"queries": ["ada"] * 5}).status_code == 422
        assert client.get("/health").json()["kind"] == "jax"
    assert "0.0.0.0 is open to the network without --token_file" in capsys.readouterr().err


def test_build_options_reach_the_builder(tmp_path, files):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "new"), "--build_if_missing"]
    arguments += ["--factory", "HNSW8", "--search", "efSearch=99", "--embeddings", str(tmp_path / "kept")]
    arguments += ["--embedding_dtype", "float16", "--shard_rows", "5"]
    stages = []
    index = load_index(parse(arguments), stages.append)
    assert index.search(["ada carlson"], 1)[0][0][0]["id"] == "2" and index.manifest["factory"] == "HNSW8"
    shards = sorted((tmp_path / "kept").glob("shard-*.npy"))
    assert [np.load(path).shape[0] for path in shards] == [5, 5, 5, 1]
    assert np.load(shards[0]).dtype == np.float16
    assert faiss.read_index(str(tmp_path / "new" / "index.faiss")).hnsw.efSearch == 99
    load_index(parse(arguments), stages.append)
    names = ["reading", "building", "loading", "reading", "loading"]  # built once
    assert [stage.split()[0] for stage in stages] == names
    for option, value, built in (("factory", "Flat", "HNSW8"), ("kind", "jax", "faiss")):
        message = f"--{option} {value}: .*/new was built with {built}; leave"
        refuses(message, load_index, parse([*arguments[:5], f"--{option}", value]), print)
    refuses("--factory: only a build takes it; add", parse, [*arguments[:4], "--factory", "Flat"])


def test_limits_reach_the_service(files):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(files[1]), "--request_seconds", "0.2"]
    with served(load(parse(arguments))) as address, socket.create_connection(address) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\n{")
        reply = b"".join(iter(lambda: connection.recv(1000), b""))
        assert b" 408 " in reply and b"--request_seconds" in reply and b"connection: close" in reply


def test_workers_are_cores_but_one_for_web(files, tmp_path, monkeypatch):
    """Equal queries of one search are paid for once; those of two searches would be paid for twice."""
    monkeypatch.setattr(assembly, "available_cores", lambda: 6)
    paths = ["--corpus_path", str(files[0]), "--index_path", str(files[1])]
    web = ["--retriever_name", "google", "--cache_path", str(tmp_path / "c"), "--web_budget", "1"]
    for threads, variable, expected in ((0, "1", 6), (0, "2", 3), (0, "99", 1), (4, "1", 4), (4, "2", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert assembly._workers(parse([*paths, "--threads", str(threads)])) == expected
        assert assembly._workers(parse([*web, "--threads", str(threads)])) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert assembly._workers(parse(paths)) == 6
