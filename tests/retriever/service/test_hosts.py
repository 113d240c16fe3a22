"""Requests for foreign hosts and from pages of other origins are refused."""

import socket
import threading

import httpx
import pytest
from retriever_rig import served

from retriever.options import parse
from retriever.service.hosts import AllowedHosts, RequireHost, host_name
from retriever.service.server import allowed_hosts, run

LOCAL = ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:80", "localhost.:8000", "[::1]", "[::1]:8000"]
LOCAL += ["127.8.9.1:1", "[::ffff:127.0.0.1]:8000", "ip6-localhost:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example:80",
    "127.0.0.1.evil.example",
    "",
    ":80",
]
FOREIGN += [
    "localhost@evil.example",
    "evil.example@localhost",
    "localhost/evil",
    "[::1].evil.example",
    "a" * 300,
]
FOREIGN += ["localhost:80:80", "localhost evil.example", "[localhost]", "[::1"]
OTHER_ADDRESSES = ["10.0.0.9", "10.0.0.9:8000", "[2001:db8::1]", "[2001:db8::1]:8000"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "localhost"])
def test_service_on_loopback_answers_for_this_machine_alone(bound):
    hosts = AllowedHosts(bound)
    assert [header for header in LOCAL if not hosts.allows(header)] == []
    assert [
        header for header in [*FOREIGN, *OTHER_ADDRESSES, socket.gethostname()] if hosts.allows(header)
    ] == []


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "10.0.0.9", "Node7.cluster"])
def test_service_on_the_network_answers_for_addresses_and_its_names(bound):
    hosts = AllowedHosts(bound)
    allowed = [*LOCAL, *OTHER_ADDRESSES, socket.gethostname(), f"{socket.gethostname()}:8000"]
    assert [header for header in allowed if not hosts.allows(header)] == []
    assert [header for header in FOREIGN if hosts.allows(header)] == []
    assert hosts.allows("node7.cluster:8000") == (bound == "Node7.cluster")


def test_option_names_further_hosts():
    options = ["--corpus_path", "c", "--index_path", "i", "--allowed_hosts", "retriever, *.Cluster.local,"]
    hosts = allowed_hosts(parse(options))
    assert all(map(hosts.allows, ["retriever:8000", "RETRIEVER", "a.b.cluster.local:80", "localhost:1"]))
    assert not any(map(hosts.allows, ["retriever.evil.example", "cluster.local", "10.0.0.9", ""]))
    assert AllowedHosts("127.0.0.1", ("*",)).allows("evil.example")


def test_name_in_header_is_without_port_and_brackets():
    assert [host_name(header) for header in ("A.b:80", "[FE80::1]:80", "a", "a:", "a:b")] == [
        "a.b", "fe80::1", "a", "a", "",
    ]  # fmt: skip


async def reply_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


def test_refusal_names_the_option_and_origins_are_compared():
    with served(RequireHost(reply_ok, AllowedHosts())) as (_, port):

        def status(**headers):
            reply = httpx.get(f"http://127.0.0.1:{port}/health", headers=headers)
            return reply.status_code, reply.text

        assert status() == (200, "ok") == status(Origin=f"http://127.0.0.1:{port}")
        refused = status(Host="node7:8000")
        assert (
            refused[0] == 403
            and "start the service with --allowed_hosts node7, or with a token" in refused[1]
        )
        assert "send the header Host" in status(Host="")[1]
        for origin in ("http://evil.example", "null", f"http://localhost:{port}"):
            assert status(Origin=origin) == (403, '{"error":"pages of other origins are not served"}')
    with served(RequireHost(reply_ok, None)) as (_, port):  # a token protects the service
        assert status(Host="evil.example") == (200, "ok")
        assert status(Host="evil.example", Origin="http://other.example")[0] == 403


@pytest.mark.medium
@pytest.mark.parametrize("token", ["", "secret"])
def test_running_service_checks_hosts_unless_a_token_protects_it(files, tmp_path, monkeypatch, token):
    monkeypatch.setenv("RETRIEVER_TOKEN", token)
    servers = []
    monkeypatch.setattr("uvicorn.Server.capture_signals", lambda server: _note(server, servers))
    port_file = tmp_path / "port"
    options = ["--corpus_path", str(files[0]), "--index_path", str(files[1]), "--port", "0"]
    options += ["--port_file", str(port_file), "--allowed_hosts", "node7"]
    thread = threading.Thread(target=run, args=(parse(options),))
    thread.start()
    try:
        while not port_file.is_file():
            thread.join(0.02)
            assert thread.is_alive()
        url = f"http://127.0.0.1:{port_file.read_text()}/retrieve"
        body = {"queries": ["ada dorn"]}
        bearer = {"Authorization": f"Bearer {token}"} if token else {}

        def status(host):
            return httpx.post(url, json=body, headers={"Host": host} | bearer).status_code

        assert [status(host) for host in ("node7:8000", "localhost", "[::1]:8000")] == [200] * 3
        expected = 200 if token else 403
        foreign = ("evil.example", "evil.example:8000", "[2001:db8::1]:8000")
        assert [status(host) for host in foreign] == [expected] * 3
    finally:
        servers[0].should_exit = True
        thread.join()


def _note(server, servers):
    """Stand in for the handlers of signals, which only the main thread can set."""
    from contextlib import nullcontext

    servers.append(server)
    return nullcontext()
