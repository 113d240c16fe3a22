"""The running service: its socket, what it says while it loads, and when it ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from typing import Any

import uvicorn

from retriever.errors import RetrieverError
from retriever.files import replacing
from retriever.options import read_token
from retriever.service.assembly import load
from retriever.service.loading import Loading
from retriever.service.web.connections import allowed_connections, bounded_protocol


def listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once.

    asyncio turns Nagle's algorithm off only for sockets it has made itself; with it, the body of every
    reply waited 40 ms for the client's acknowledgement of the head.

    Raises:
        RetrieverError: the port is taken.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise RetrieverError(
            f"--port {port}: {host} does not give it ({error.strerror}); choose another"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def make_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    """Nothing but HTTP with bounded heads: uvicorn would open WebSockets before a token is asked for."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until a signal, or until the parent process has ended; says what it loads meanwhile.

    Raises:
        RetrieverError: the port is taken, or as `read_token` and `load`.
    """
    listener = listen(arguments.host, arguments.port)
    port = listener.getsockname()[1]
    loading = Loading(lambda report: load(arguments, report), read_token(arguments))
    protocol = bounded_protocol(allowed_connections(arguments.max_connections), arguments.request_seconds)
    server = uvicorn.Server(make_config(loading, protocol))

    async def watch() -> None:
        try:
            await loading.wait()
        except BaseException:
            server.should_exit = True
            raise
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        sys.stdout.write(f"ready on http://{host}:{port}\n")
        sys.stdout.flush()
        if arguments.port_file:
            with replacing(arguments.port_file) as partial:
                partial.write_text(str(port))

    async def follow_parent() -> None:
        while os.getppid() == arguments.parent_pid:
            await asyncio.sleep(0.5)
        server.should_exit = True

    async def serve() -> None:
        tasks = [asyncio.create_task(watch())]
        if arguments.parent_pid:
            tasks.append(asyncio.create_task(follow_parent()))
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    asyncio.run(serve())
