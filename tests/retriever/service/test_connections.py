"""Connections over real sockets: idle, slow, too many, floods."""

import asyncio
import contextlib
import resource
import socket
import time
from unittest.mock import AsyncMock

import pytest
from retriever_rig import Counting, served

from benchmarks.retrieval.flood import TOKEN, bodies, idle, service, slow, watch
from retriever.service.app import BodyLimit, make_app
from retriever.service.engine import Limits
from retriever.service.server import MAX_HEAD, SPARE_FILES, allowed_connections

BODY = b'{"queries": ["ada almson"], "topk": 1}'
HEAD = b"POST /retrieve HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"


LENGTH = len(BODY)
MB = 2**20
REQUEST = HEAD % LENGTH + b"\r\n" + BODY


def request(length=LENGTH):
    return HEAD % length + b"\r\n"


def read(connection):
    """All that comes until the server has closed, or until a whole reply is there."""
    data = b""
    connection.settimeout(20)
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
    with socket.create_connection(address) as connection:
        connection.sendall(content)
        return read(connection)


def test_idle_connections_beyond_the_limit_are_closed(index):
    with served(make_app(index, 1), max_connections=20) as address, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(60)]
        assert b" 200 OK" in ask(address)
        time.sleep(0.1)
        closed = [connection for connection in idle if is_closed(connection)]
        assert closed == idle[:41]  # those that waited longest; of 61 the twenty newest stay
        for connection in idle[41:]:
            connection.sendall(REQUEST)
            assert b" 200 OK" in read(connection)


def test_unread_request_is_not_dropped(index):
    """asyncio's loop, which runs where uvloop is not installed, takes in all that connect before it reads."""
    app = make_app(index, 1)

    async def blocking(scope, receive, send):
        if scope.get("path") == "/block":
            time.sleep(0.5)  # as the encoding of a large reply: nothing is accepted or read meanwhile
        await app(scope, receive, send)

    with served(blocking, max_connections=5, loop="asyncio") as address, contextlib.ExitStack() as stack:
        blocker = stack.enter_context(socket.create_connection(address))
        blocker.sendall(b"GET /block HTTP/1.1\r\nhost: h\r\n\r\n")
        time.sleep(0.1)
        client = stack.enter_context(socket.create_connection(address))
        client.sendall(REQUEST)
        for _ in range(30):
            stack.enter_context(socket.create_connection(address))
        assert b" 200 OK" in read(client)


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.setblocking(True)


def test_connection_beyond_busy_ones_gets_503(index):
    with served(make_app(index, 1), max_connections=3) as address:
        busy = [socket.create_connection(address) for _ in range(3)]
        for connection in busy:
            connection.sendall(request() + BODY[:10])
        time.sleep(0.2)
        refused = ask(address)
        assert b" 503 " in refused and b"retry-after: 1" in refused and b"--max_connections" in refused
        for connection in busy:
            connection.sendall(BODY[10:])
            assert b" 200 OK" in read(connection)
            connection.close()


def test_endless_head_is_cut_off(index):
    """Also the second request's of a connection, whose first one the server had answered."""
    with served(make_app(index, 1), seconds=0.5) as address:
        for first in (b"", REQUEST):
            with socket.create_connection(address) as connection:
                if first:
                    connection.sendall(first)
                    assert b" 200 OK" in read(connection)
                connection.sendall(b"POST /retr")
                with pytest.raises(OSError):
                    for _ in range(60):  # a byte now and then must not keep it open
                        time.sleep(0.05)
                        connection.sendall(b"i")


def test_long_search_is_not_cut_off(index):
    limits = Limits(request_seconds=0.3)
    with served(make_app(Counting(index, seconds=1.0), 1, limits=limits), seconds=0.3) as address:
        assert b" 200 OK" in ask(address)


@pytest.mark.medium
def test_untaken_reply_is_given_up(index):
    """16 MB do not fit into the buffers of the sockets."""

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": b"x" * 2**18, "more_body": True})

    with served(app, seconds=0.5) as address, socket.create_connection(address) as connection:
        connection.sendall(REQUEST)
        time.sleep(1.5)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(2**20):
                received += len(part)
        assert received < 64 * 2**18


def test_bodies_of_all_requests_together_are_bounded(index):
    limits, large = Limits(max_body=2**20, max_bodies=2**20), request(500_000) + BODY.ljust(500_000)
    with served(make_app(index, 1, limits=limits)) as address:
        with socket.create_connection(address) as half:
            half.sendall(request(2**20 - 100) + b" " * 700_000)
            time.sleep(0.2)
            refused = ask(address, large)
            assert b" 503 " in refused and b"retry-after: 1" in refused
        time.sleep(0.2)
        assert b" 200 OK" in ask(address, large)  # the memory was given back


@pytest.mark.parametrize("declared", [b"9" * 5000, b"-1", b"1e3"])
def test_invalid_length_is_refused(declared):
    sent = AsyncMock()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", declared)]}
    asyncio.run(BodyLimit(None, 100)(scope, None, sent))
    assert sent.await_args_list[0].args[0]["status"] == 413


def test_connections_leave_descriptors_for_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allowed_connections(10) == 10
    assert allowed_connections(10**9) == (10**9 if hard == resource.RLIM_INFINITY else hard - SPARE_FILES)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def open_health(address, method, size=16 * 2**20):
    """A connection that has sent the head of a request to /health, and nearly all of its body."""
    connection = socket.create_connection(address)
    head = f"{method} /health HTTP/1.1\r\nhost: h\r\ncontent-length: {size}\r\n\r\n"
    with contextlib.suppress(OSError):  # the service may have answered and closed
        connection.sendall(head.encode() + b" " * (size - 1))
    return connection


@pytest.mark.parametrize(("method", "status"), [("POST", b" 401 "), ("GET", b" 200 ")])
def test_bodies_to_health_delay_no_search(index, method, status):
    """Eight of 16 MB took all that bodies may take."""
    with served(make_app(index, 1, token="secret")) as address, contextlib.ExitStack() as stack:
        held = [stack.enter_context(open_health(address, method)) for _ in range(8)]
        with socket.create_connection(address) as connection:
            connection.sendall(HEAD % LENGTH + b"authorization: Bearer secret\r\n\r\n" + BODY)
            assert b" 200 OK" in read(connection)
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
    """Also one that comes whole, and as a second request of its connection."""
    largest = (MAX_HEAD - len(start + end)) // len(fill)
    with served(make_app(index, 1)) as address:
        for before in (b"", REQUEST):
            for count, status in ((largest, b" 200 OK"), (largest + 1, b" 400 ")):
                with socket.create_connection(address) as connection:
                    if before:
                        connection.sendall(before)
                        assert b" 200 OK" in read(connection)
                    head = start + fill * count + end
                    for part in (head[:40_000], head[40_000:]) if in_parts else (head,):
                        connection.sendall(part)
                        time.sleep(0.02 * in_parts)
                    reply = read(connection)
                    assert status in reply, (before, count)
                    assert (b'{"error": "' in reply and b"65536 bytes" in reply) == (count > largest)


def test_trailers_and_a_waiting_head_are_bounded(index):
    """What follows a body in chunks, and a head that comes with the request before it."""
    chunked = HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"\r\n"
    body = b"%x\r\n%s\r\n0\r\n" % (LENGTH, BODY)
    second = b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"x" * MAX_HEAD + b"\r\n\r\n"
    with served(make_app(index, 1)) as address:
        for sent, statuses in (
            (chunked + body + b"x: y\r\n\r\n", [b"200"]),
            (chunked + body + b"x: " + b"y" * MAX_HEAD + b"\r\n\r\n", [b"400"]),
            (REQUEST + second, [b"200", b"400"]),
        ):
            with socket.create_connection(address) as connection:
                connection.sendall(sent)
                replies = b""
                while replies.count(b"HTTP/1.1 ") < len(statuses):
                    replies += read(connection)
            assert [part[:3] for part in replies.split(b"HTTP/1.1 ")[1:]] == statuses


@pytest.fixture(scope="module")
def running(files):
    with service(*files, "--max_connections", "150", "--request_seconds", "2") as (address, pid):
        bodies(address, 2, 15 * MB, TOKEN)  # buffers of a first large body stay
        yield address, pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flood", "growth"),
    [
        ("more idle connections than it takes", lambda address: idle(address, 400, 3.0), 20 * MB),
        ("slow heads and bodies", lambda address: slow(address, 60, 4.0), 20 * MB),
        ("40 bodies without token", lambda address: bodies(address, 40, 15 * MB), 30 * MB),
        # 128 MB of bodies at most, up to twice that while they grow
        ("40 bodies with token", lambda address: bodies(address, 40, 15 * MB, TOKEN), 270 * MB),
        ("a body in small parts", lambda address: bodies(address, 1, 4 * MB, TOKEN, 1024), 30 * MB),
    ],
)
def test_memory_stays_and_the_service_answers(running, name, flood, growth):
    address, pid = running
    outcome = watch(name, address, pid, lambda: flood(address))
    assert outcome.answers >= 2
    assert outcome.longest < 10, outcome
    assert outcome.most - outcome.before < growth, outcome
