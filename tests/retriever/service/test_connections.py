"""Connections over real sockets: idle, slow, too many, floods."""

import asyncio
import contextlib
import resource
import socket
import time
from itertools import product
from unittest.mock import AsyncMock

import pytest
from retriever_rig import Counting, served

from retriever.service.app import BodyLimit, make_app
from retriever.service.engine import Limits
from retriever.service.server import MAX_HEAD, SPARE_FILES, allowed_connections

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
    with contextlib.ExitStack() as stack:
        return read(connected(stack, address, content))


def test_idle_connections_beyond_the_limit_are_closed(index):
    with served(make_app(index, 1), max_connections=20) as address, contextlib.ExitStack() as stack:
        idle = [connected(stack, address) for _ in range(60)]
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
        connected(stack, address, b"GET /block HTTP/1.1\r\nhost: h\r\n\r\n")
        time.sleep(0.1)
        client = connected(stack, address, REQUEST)
        for _ in range(30):
            connected(stack, address)
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
    with served(make_app(index, 1), max_connections=3) as address, contextlib.ExitStack() as stack:
        busy = [connected(stack, address, REQUEST[:-20]) for _ in range(3)]
        time.sleep(0.2)
        refused = ask(address)
        assert b" 503 " in refused and b"retry-after: 1" in refused and b"--max_connections" in refused
        for connection in busy:
            connection.sendall(REQUEST[-20:])
            assert b" 200 OK" in read(connection)


def test_endless_head_is_cut_off(index):
    """Also the second request's of a connection, whose first one the server had answered."""
    with served(make_app(index, 1), seconds=0.5) as address, contextlib.ExitStack() as stack:
        for is_second in (False, True):
            connection = connected(stack, address, REQUEST if is_second else b"")
            assert not is_second or b" 200 OK" in read(connection)
            with pytest.raises(OSError):
                for letter in b"POST /retr" + b"i" * 60:  # a byte now and then must not keep it open
                    time.sleep(0.05)
                    connection.sendall(bytes([letter]))


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
    limits, large = Limits(max_body=2**20, max_bodies=2**20), HEAD % 500_000 + b"\r\n" + BODY.ljust(500_000)
    with served(make_app(index, 1, limits=limits)) as address:
        with contextlib.ExitStack() as stack:
            connected(stack, address, HEAD % (2**20 - 100) + b"\r\n" + b" " * 700_000)
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
    """Also one that comes whole, and as a second request of its connection."""
    largest = (MAX_HEAD - len(start + end)) // len(fill)
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
    """What follows a body in chunks, and a head that comes with the request before it."""
    chunked = HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked") + b"\r\n"
    body = b"%x\r\n%s\r\n0\r\n" % (LENGTH, BODY)
    second = b"GET /health HTTP/1.1\r\nhost: h\r\nx: " + b"x" * MAX_HEAD + b"\r\n\r\n"
    with served(make_app(index, 1)) as address, contextlib.ExitStack() as stack:
        for sent, statuses in (
            (chunked + body + b"x: y\r\n\r\n", [b"200"]),
            (chunked + body + b"x: " + b"y" * MAX_HEAD + b"\r\n\r\n", [b"400"]),
            (REQUEST + second, [b"200", b"400"]),
        ):
            connection, replies = connected(stack, address, sent), b""
            while replies.count(b"HTTP/1.1 ") < len(statuses):
                replies += read(connection)
            assert [part[:3] for part in replies.split(b"HTTP/1.1 ")[1:]] == statuses
