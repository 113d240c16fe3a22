"""What MCP servers send, bounded and repaired before the package `mcp` reads it; the log of their programs.

The optional package `mcp` is imported in functions.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from calibadv_jax.core.tags import to_printable_line, well_formed_json
from calibadv_jax.services import http_client
from calibadv_jax.services.child_process import rotate_log
from calibadv_jax.services.http_client import BadReply

LONGEST_EXCERPT = 200  # Characters of a server's text in a message.
_TAIL_LENGTH = 4096  # Bytes at the end of a log that are kept for messages.
_READ_SIZE = 2**16  # Bytes that are read from a log at once.


class ServerLog:
    """A pipe for the standard error of a server's program; a thread adds its text to a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._tail = b""
        reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "wb", buffering=0)
        self._thread = threading.Thread(target=self._copy, args=(reading,), name="MCP log", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line of the program's output, once it has ended."""
        self.stream.close()
        self._thread.join(1.0)  # with a limit: programs that the server started may hold the pipe open
        last = self._tail.decode(errors="replace").strip().rpartition("\n")[2]
        return to_printable_line(last[:LONGEST_EXCERPT])

    def _copy(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as source:
            while text := source.read(_READ_SIZE):
                self._tail = (self._tail + text)[-_TAIL_LENGTH:]
                with suppress(OSError):  # a full disk must not stop the server
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    rotate_log(self._path)
                    with self._path.open("ab") as log:
                        log.write(text)


@asynccontextmanager
async def messages_only(transport: AbstractAsyncContextManager[Any], log: ServerLog) -> AsyncIterator[Any]:
    """Open the streams of a program's pipes, and forward the messages that the program writes.

    Lone surrogates in a message are repaired; a line that is no message is written to the log. The package
    would drop both without a word. A call whose reply is such a line gets no reply.

    Args:
        transport: the package's transport to the program.
        log: the log of the program.

    Yields:
        The stream of messages from the program, and the transport's stream of requests to it.
    """
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    readable, messages = anyio.create_memory_object_stream[Any]()

    async def forward(lines: Any) -> None:
        async with readable:
            async for item in lines:
                if isinstance(item, ValueError):
                    # The package forwards the ValidationError of pydantic for a line that it cannot parse.
                    line = str(item.errors()[0]["input"])  # type: ignore[attr-defined]
                    repaired = well_formed_json(line.encode("utf-8", "replace"))
                    try:
                        message = jsonrpc_message_adapter.validate_json(repaired, by_name=False)
                        item = SessionMessage(message)
                    except ValueError:
                        log.stream.write(f"no message of MCP: {line}\n".encode(errors="replace"))
                        continue
                await readable.send(item)

    async with transport as (lines, requests), messages, anyio.create_task_group() as tasks:
        tasks.start_soon(forward, lines)
        yield messages, requests
        tasks.cancel_scope.cancel()


async def bound_reply(response: Any) -> None:
    """Bound a reply of the package's HTTP client, and replace lone surrogates in it.

    Args:
        response: a response of the client, whose `aiter_bytes` is replaced.
    """
    from httpx2 import StreamError

    read = response.aiter_bytes

    async def read_whole(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        try:
            yield well_formed_json(await http_client.read_all(read(chunk_size)))
        except BadReply as error:
            raise StreamError(str(error)) from error

    content_type = response.headers.get("content-type", "").lower()
    # In a stream of events, the package itself bounds each event.
    if not content_type.startswith("text/event-stream"):
        response.aiter_bytes = read_whole
