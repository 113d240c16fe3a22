"""The running service: its socket, loading beside it, and its end by a signal."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from typing import Any

import uvicorn

from retriever.errors import RetrieverError
from retriever.files import atomic_write
from retriever.options import read_token
from retriever.service.assembly import load
from retriever.service.hosts import AllowedHosts, RequireHost
from retriever.service.loading import Loading, ReportStage
from retriever.service.protocol import allowed_connections, bounded_protocol

# Seconds between two looks at whether the parent process has ended.
PARENT_SECONDS = 0.5
# Connections that the loop accepts before it does anything else. They need files before those that they
# replace are closed, four rounds of the loop later: together fewer than `protocol.SPARE_FILES`.
ACCEPTED_AT_ONCE = 16
# Connections that the system keeps until they are accepted.
QUEUED_CONNECTIONS = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket without Nagle's algorithm.

    asyncio turns it off only for its own sockets; with it, the body of a reply waited 40 ms.

    Args:
        host: Address to listen on; ``::`` takes IPv4 too.
        port: Port to listen on; 0 for any free port.

    Raises:
        RetrieverError: The port is in use, or the address is not of this machine.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=is_dual)
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]  # Python adds the address
        raise RetrieverError(
            f"--port {port}: cannot listen on {host}:{port} ({reason}); choose another --port or --host"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def allowed_hosts(arguments: argparse.Namespace) -> AllowedHosts:
    """Return the hosts that a service without a token answers for.

    Args:
        arguments: Options of the service, as `options.parse` returns them.
    """
    names = [name.strip() for name in arguments.allowed_hosts.split(",")]
    return AllowedHosts(arguments.host, tuple(name for name in names if name))


def make_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """Return uvicorn's settings, without WebSockets: it would open them before it asks for a token."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
    )


class Server(uvicorn.Server):
    """uvicorn's server, whose queue of connections is longer than the number accepted at once.

    The loop uses one number for both. With a large one, a flood of connections took all files of the process.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED_CONNECTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or until the parent process has ended.

    Args:
        arguments: Options of the service, as `options.parse` returns them.

    Raises:
        RetrieverError: The port is in use, or as `load`.
    """
    listener = listen(arguments.host, arguments.port)

    def load_app(report: ReportStage) -> Any:
        return load(arguments, report)

    token = read_token(arguments)
    loading = Loading(load_app, token)
    app = RequireHost(loading, None if token else allowed_hosts(arguments))
    max_connections = allowed_connections(arguments.max_connections)
    protocol = bounded_protocol(max_connections, arguments.request_seconds)
    server = Server(make_config(app, protocol))
    asyncio.run(_serve(server, listener, loading, arguments))


async def _serve(
    server: Server, listener: socket.socket, loading: Loading, arguments: argparse.Namespace
) -> None:
    """Serve, and raise what loading raises."""
    port = listener.getsockname()[1]
    tasks = [asyncio.create_task(_announce(server, loading, port, arguments))]
    if arguments.parent_pid:
        tasks.append(asyncio.create_task(_follow_parent(server, arguments.parent_pid)))
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def _announce(server: Server, loading: Loading, port: int, arguments: argparse.Namespace) -> None:
    """Say that the service is ready when it is loaded; stop the server if it cannot be."""
    try:
        await loading.wait()
    except BaseException:
        server.should_exit = True
        raise
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    sys.stdout.write(f"ready on http://{host}:{port}\n")
    sys.stdout.flush()
    if arguments.port_file:
        with atomic_write(arguments.port_file) as partial:
            partial.write_text(str(port))


async def _follow_parent(server: Server, parent_pid: int) -> None:
    """Stop the server when the parent process has ended."""
    while os.getppid() == parent_pid:
        await asyncio.sleep(PARENT_SECONDS)
    server.should_exit = True
