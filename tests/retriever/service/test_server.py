"""The running service: its options, loading, its end; connections that are idle, slow or too many."""

import asyncio
import contextlib
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import faiss
import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from retriever_rig import NAMES, Counting, refuses, served

from retriever.indexes.lock import locked
from retriever.options import parse
from retriever.service import assembly, protocol
from retriever.service.app import make_app
from retriever.service.assembly import load, load_index
from retriever.service.identity import index_identity
from retriever.service.limits import Limits
from retriever.service.loading import Loading
from retriever.service.middleware import BodyLimit
from retriever.service.server import listen, run


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
    go_on, token = threading.Event(), {"Authorization": "Bearer secret"}

    def load(report):
        report("reading the corpus")
        go_on.wait()
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


STUCK = """
import sys, time
from retriever import serve
from retriever.service import server
server.load = lambda *_: (print("loading", flush=True), time.sleep(60))
sys.exit(serve.main())
"""


@pytest.mark.medium
def test_stop_does_not_wait_for_loading():
    call = [sys.executable, "-c", STUCK, "--corpus_path", "c", "--index_path", "i", "--port", "0"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_under_load_drops_no_accepted_request(files, tmp_path):
    corpus, folder = files
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus), "--port", "0"]
    command += ["--index_path", str(folder), "--port_file", str(port_file), "--max_batch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    outcomes = []

    async def ask(client, url):
        try:
            reply = await client.post(url, json={"queries": NAMES * 8, "topk": 16})
            outcomes.append(reply.status_code)
        except httpx.ConnectError:
            outcomes.append("refused")  # it came after the port was closed
        except httpx.TransportError as error:
            outcomes.append(f"dropped: {error!r}")

    async def load(url):
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            await ask(client, url)
            tasks = [asyncio.create_task(ask(client, url)) for _ in range(12)]
            while outcomes.count(200) < 2 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)

    try:
        while not port_file.is_file():
            assert process.poll() is None
            time.sleep(0.02)
        asyncio.run(load(f"http://127.0.0.1:{port_file.read_text()}/retrieve"))
        assert process.wait() in (0, -signal.SIGTERM)  # uvicorn raises the signal again at its end
    finally:
        process.kill()
    assert outcomes.count(200) >= 2
    assert set(outcomes) <= {200, "refused"}, outcomes


def test_taken_port_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        options = ["--corpus_path", "c", "--index_path", "i", "--port", port]
        refuses(
            f"--port {port}: cannot listen on 127.0.0.1:{port} .Address already in use", run, parse(options)
        )
    refuses("--port 70000: cannot listen", run, parse([*options[:-1], "70000"]))


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
        message = f"--{option} {value}: .*/new was built with {built}; leave the option out"
        refuses(message, load_index, parse([*arguments[:5], f"--{option}", value]), print)
    refuses(
        "--factory: only a build takes it; add --build_if_missing",
        parse,
        [*arguments[:4], "--factory", "Flat"],
    )


@pytest.mark.parametrize("is_finished", [True, False])
def test_second_start_waits_for_the_build_of_the_first(files, tmp_path, is_finished):
    """It ended with an error before, and took the trainer beside it along."""
    path = tmp_path / "new"
    options = ["--corpus_path", str(files[0]), "--index_path", str(path), "--build_if_missing"]
    is_building, is_waiting = threading.Event(), threading.Event()

    def build_first():
        with locked(path):
            is_building.set()
            is_waiting.wait()
            if is_finished:
                shutil.copytree(files[1], path)

    first = threading.Thread(target=build_first)
    first.start()
    is_building.wait()
    stages = []

    def note(stage):
        stages.append(stage.split()[0])
        if stage == f"waiting for another process, which builds {path}":
            is_waiting.set()

    index = load_index(parse(options), note)
    first.join()
    assert index.search(["ada carlson"], 1)[0][0][0]["id"] == "2"
    rebuilds = [] if is_finished else ["building"]  # the first one was killed
    assert stages == ["reading", "building", "waiting", *rebuilds, "loading"]
    assert not path.with_name("new.lock").exists()


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
    web = ["--retriever_name", "serpapi", "--cache_path", str(tmp_path / "c"), "--web_budget", "1"]
    for threads, variable, expected in ((0, "1", 6), (0, "2", 3), (0, "99", 1), (4, "1", 4), (4, "2", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert assembly._workers(parse([*paths, "--threads", str(threads)])) == expected
        assert assembly._workers(parse([*web, "--threads", str(threads)])) == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert assembly._workers(parse(paths)) == 6


BODY = b'{"queries": ["ada almson"], "topk": 1}'
HEAD = b"POST /retrieve HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
LENGTH = len(BODY)
REQUEST = HEAD % LENGTH + b"\r\n" + BODY


def connected(stack, address, sent=b""):
    connection = stack.enter_context(socket.create_connection(address))
    connection.sendall(sent)
    return connection


def read(connection):
    """All that comes until the server has closed, or until a whole reply is there."""
    data = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return data
        data += part
        head, end, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not part or (end and lengths and len(body) >= int(lengths[0][15:])):
            return data


def ask(address, content=REQUEST):
    with contextlib.ExitStack() as stack:
        return read(connected(stack, address, content))


def test_idle_connections_beyond_the_limit_are_closed(index):
    with served(make_app(index, 1), max_connections=20) as address, contextlib.ExitStack() as stack:
        idle = [connected(stack, address) for _ in range(60)]
        assert b" 200 OK" in ask(address)
        for connection in idle[:41]:  # those that waited longest; of 61 the twenty newest stay
            assert read(connection) == b""
        for connection in idle[41:]:
            connection.sendall(REQUEST)
            assert b" 200 OK" in read(connection)


def test_room_is_made_without_a_look_at_every_connection(index, monkeypatch):
    """A new connection at the limit sorted all others, which took 7 ms with 4,096 of them."""
    looks = []
    for name in ("is_waiting", "has_unread"):
        method = getattr(protocol.BoundedProtocol, name)
        monkeypatch.setattr(
            protocol.BoundedProtocol, name, lambda self, method=method: looks.append(1) or method(self)
        )
    with served(make_app(index, 1), max_connections=50) as address, contextlib.ExitStack() as stack:
        idle = [connected(stack, address) for _ in range(150)]
        assert [read(connection) for connection in idle[:100]] == [b""] * 100
        assert len(looks) <= 2 * len(idle)
        assert b" 200 OK" in ask(address)


def test_connection_waits_anew_after_each_reply(index):
    """Those that asked last stay, although they were opened first."""
    with served(make_app(index, 1), max_connections=3) as address, contextlib.ExitStack() as stack:
        first, second, third = (connected(stack, address) for _ in range(3))
        for connection in (second, first):
            connection.sendall(REQUEST)
            assert b" 200 OK" in read(connection)
        connected(stack, address)
        assert read(third) == b""
        connected(stack, address)
        assert read(second) == b""
        first.sendall(REQUEST)
        assert b" 200 OK" in read(first)


def test_unread_request_is_not_dropped(index):
    """asyncio's loop, which runs where uvloop is not installed, takes in all that connect before it reads."""
    app = make_app(index, 1)
    is_blocked, go_on = threading.Event(), threading.Event()

    async def blocking(scope, receive, send):
        if scope.get("path") == "/block":
            is_blocked.set()
            go_on.wait()  # as the encoding of a large reply: nothing is accepted or read meanwhile
        await app(scope, receive, send)

    with served(blocking, max_connections=5, loop="asyncio") as address, contextlib.ExitStack() as stack:
        connected(stack, address, b"GET /block HTTP/1.1\r\nhost: h\r\n\r\n")
        is_blocked.wait()
        client = connected(stack, address, REQUEST)
        for _ in range(30):
            connected(stack, address)
        go_on.set()
        assert b" 200 OK" in read(client)


def test_connection_beyond_busy_ones_gets_503(index):
    with served(make_app(index, 1), max_connections=3) as address, contextlib.ExitStack() as stack:
        busy = [connected(stack, address, REQUEST[:-20]) for _ in range(3)]
        while b" 503 " not in (refused := ask(address)):  # until the heads of all three were read
            assert b" 200 OK" in refused
        assert all(part in refused for part in (b"retry-after: 1", b"--max_connections"))
        for connection in busy:
            connection.sendall(REQUEST[-20:])
            assert b" 200 OK" in read(connection)


def test_endless_head_is_cut_off(index):
    with served(make_app(index, 1), seconds=0.5) as address, contextlib.ExitStack() as stack:
        for is_second in (False, True):
            connection = connected(stack, address, REQUEST if is_second else b"")
            assert not is_second or b" 200 OK" in read(connection)
            connection.sendall(b"POST /retr")
            with pytest.raises(OSError):
                while True:  # a byte now and then must not keep it open
                    time.sleep(0.05)
                    connection.sendall(b"i")


def test_body_that_trickles_gets_408(index):
    """A byte now and then does not renew the time."""
    limits = Limits(request_seconds=0.5)
    with served(make_app(index, 1, limits=limits)) as address:
        with contextlib.ExitStack() as stack:
            connection = connected(stack, address, HEAD % 100_000 + b"\r\n")
            while not select.select([connection], [], [], 0.05)[0]:
                connection.sendall(b" ")
            reply = read(connection)
        assert b" 408 " in reply
        assert b"--request_seconds" in reply
        assert b"connection: close" in reply
        assert b" 200 OK" in ask(address)


def test_long_search_is_not_cut_off(index):
    limits = Limits(request_seconds=0.3)
    with served(make_app(Counting(index, seconds=1.0), 1, limits=limits), seconds=0.3) as address:
        assert b" 200 OK" in ask(address)


@pytest.mark.medium
def test_untaken_reply_is_given_up(index):
    """16 MB do not fit into the buffers of the sockets."""

    is_given_up = threading.Event()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * 2**18, "more_body": True})
        is_given_up.set()  # what is sent to a lost connection is dropped

    with served(app, seconds=0.5) as address, socket.create_connection(address) as connection:
        connection.sendall(REQUEST)
        is_given_up.wait()
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                received += len(part)
        assert received < 64 * 2**18


def test_bodies_of_all_requests_together_are_bounded(index):
    limits, large = Limits(max_body=2**20, max_bodies=2**20), HEAD % 500_000 + b"\r\n" + BODY.ljust(500_000)
    with served(make_app(index, 1, limits=limits)) as address:
        with contextlib.ExitStack() as stack:
            connected(stack, address, HEAD % (2**20 - 100) + b"\r\n" + b" " * 700_000)
            while b" 503 " not in (refused := ask(address, large)):  # until the first body has come
                assert b" 200 OK" in refused
            assert b"retry-after: 1" in refused
        while b" 200 OK" not in ask(address, large):  # until the memory is given back
            pass


@pytest.mark.parametrize("declared", [b"9" * 5000, b"-1", b"1e3"])
def test_invalid_length_is_refused(declared):
    sent = AsyncMock()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", declared)]}
    asyncio.run(BodyLimit(None, 100)(scope, None, sent))
    assert sent.await_args_list[0].args[0]["status"] == 413


def test_connections_leave_descriptors_for_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert protocol.allowed_connections(10) == 10
    most = 10**9 if hard == resource.RLIM_INFINITY else hard - protocol.SPARE_FILES
    assert protocol.allowed_connections(10**9) == most
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def test_soft_limit_of_descriptors_is_a_number(monkeypatch):
    """macOS has no hard limit, and refuses an infinite soft one."""
    set_limits, infinite = Mock(), resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, infinite))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert protocol.allowed_connections(4096) == 4096
    expected = (4096 + protocol.SPARE_FILES, infinite)
    set_limits.assert_called_once_with(resource.RLIMIT_NOFILE, expected)


@pytest.mark.parametrize(("method", "status"), [("POST", b" 401 "), ("GET", b" 200 ")])
def test_bodies_to_health_delay_no_search(index, method, status):
    """Eight of 16 MB took all that bodies may take."""
    size, held = 16 * 2**20, []
    head = f"{method} /health HTTP/1.1\r\nhost: h\r\ncontent-length: {size}\r\n\r\n"
    with served(make_app(index, 1, token="secret")) as address, contextlib.ExitStack() as stack:
        for _ in range(8):
            held.append(connected(stack, address))
            with contextlib.suppress(OSError):  # the service may have answered and closed
                held[-1].sendall(head.encode() + b" " * (size - 1))
        assert b" 200 OK" in ask(address, HEAD % LENGTH + b"authorization: Bearer secret\r\n\r\n" + BODY)
        assert status in read(held[0])


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    ("start", "fill", "end"),
    [
        (b"GET /health HTTP/1.1\r\nhost: h\r\nx: ", b"x", b"\r\n\r\n"),
        (b"GET /health HTTP/1.1\r\nhost: h\r\nx:", b" ", b"x\r\n\r\n"),
        (b"GET /health?", b"x", b" HTTP/1.1\r\nhost: h\r\n\r\n"),
        (b"GET /health HTTP/1.1\r\nhost: h\r\n", b"x: y\r\n", b"\r\n"),
    ],
)
def test_head_of_64_kib_is_the_largest(index, start, fill, end, in_parts):
    largest = (protocol.MAX_HEAD - len(start + end)) // len(fill)
    with served(make_app(index, 1)) as address, contextlib.ExitStack() as stack:
        for before, count in product((b"", REQUEST), (largest, largest + 1)):
            connection = connected(stack, address, before)
            assert not before or b" 200 OK" in read(connection)
            head = start + fill * count + end
            for part in (head[:40_000], head[40_000:]) if in_parts else (head,):
                connection.sendall(part)
                time.sleep(0.02 * in_parts)
            reply, is_refused = read(connection), count > largest
            assert (b" 400 " if is_refused else b" 200 OK") in reply, (before, count)
            assert (b'{"error": "' in reply and b"65536 bytes" in reply) == is_refused


def test_trailers_and_a_waiting_head_are_bounded(index):
    chunked = HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"\r\n"
    body = b"%x\r\n%s\r\n0\r\n" % (LENGTH, BODY)
    second = b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"x" * protocol.MAX_HEAD + b"\r\n\r\n"
    with served(make_app(index, 1)) as address, contextlib.ExitStack() as stack:
        for sent, statuses in (
            (chunked + body + b"x: y\r\n\r\n", [b"200"]),
            (chunked + body + b"x: " + b"y" * protocol.MAX_HEAD + b"\r\n\r\n", [b"400"]),
            (REQUEST + second, [b"200", b"400"]),
        ):
            connection, replies = connected(stack, address, sent), b""
            while replies.count(b"HTTP/1.1 ") < len(statuses):
                replies += read(connection)
            assert [part[:3] for part in replies.split(b"HTTP/1.1 ")[1:]] == statuses


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.medium
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="not Linux")
@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nhost: h\r\nx: ",
        b"GET /",
        HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"\r\n2\r\n{}\r\n0\r\nx: ",
        REQUEST + b"GET /health HTTP/1.1\r\nx: ",
    ],
    ids=["header", "address", "trailer", "next request"],
)
def test_huge_head_is_not_kept_in_memory(index, start):
    """Sixteen heads of 58 MB took 600 MB."""
    head = start + b"x" * 58 * 10**6
    with served(make_app(index, 1)) as address, contextlib.ExitStack() as stack:
        before = resident_bytes()
        for _ in range(16):
            connection = connected(stack, address)
            connection.settimeout(5)
            with contextlib.suppress(OSError):  # the service has closed
                connection.sendall(head)
        assert resident_bytes() - before < 100 * 10**6
        assert b" 200 OK" in ask(address)
