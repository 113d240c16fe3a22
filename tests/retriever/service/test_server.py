"""The running service: its connections and its end."""

import asyncio
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

import httpx
from retriever_rig import NAMES

from retriever.service.server import listen


def test_connections_send_at_once():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.medium
def test_sigterm_under_load_drops_no_accepted_request(files, tmp_path):
    corpus, folder = files
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus), "--port", "0"]
    command += ["--index_path", str(folder), "--port_file", str(port_file), "--max_batch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not port_file.is_file():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        url = f"http://127.0.0.1:{port_file.read_text()}/retrieve"
        outcomes = []

        async def one(client):
            try:
                reply = await client.post(url, json={"queries": NAMES * 8, "topk": 16})
                outcomes.append(reply.status_code)
            except httpx.ConnectError:
                outcomes.append("refused")  # it came after the door was closed
            except httpx.TransportError as error:
                outcomes.append(f"dropped: {error!r}")

        async def load():
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                await one(client)
                tasks = [asyncio.create_task(one(client)) for _ in range(12)]
                while outcomes.count(200) < 2 and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                await asyncio.gather(*tasks)

        asyncio.run(load())
        assert process.wait(30) in (0, -signal.SIGTERM)  # uvicorn raises the signal again when it is done
        assert outcomes.count(200) >= 2
        assert set(outcomes) <= {200, "refused"}, outcomes
    finally:
        process.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::", "localhost"])
def test_addresses_of_both_families(host):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        socket.create_connection(("::1" if host == "::" else host, listener.getsockname()[1])).close()
        if host == "::":  # of both families at once
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
