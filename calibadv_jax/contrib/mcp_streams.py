"""What MCP servers send before the package `mcp` reads it: bounded, and errors are those of one call."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from calibadv_jax.core.tags import printable, well_formed_json
from calibadv_jax.services.child_process import set_aside
from calibadv_jax.services.http_client import BadReply, read_all

PARSE_ERROR = -32700  # JSON-RPC's code
LONGEST_EXCERPT = 200  # letters
_TAIL = 4096  # bytes of a log that are kept for messages
_ID = re.compile(r'"id"\s*:\s*(\d+)')
_RESULT = re.compile(r'"(?:result|error)"\s*:')


def excerpt(text: str) -> str:
    """The beginning of a server's text, on one line without control characters."""
    return printable(text[: 2 * LONGEST_EXCERPT])[:LONGEST_EXCERPT]


class ServerLog:
    """The standard error of a server's program, a pipe whose text is added to a file.

    Args:
        path: what is longer than `LONGEST_LOG` becomes FILE.old; None: only the end is kept, for messages.
        warn: told the text of a line on standard output that is no message.
    """

    def __init__(self, path: Path | None, warn: Callable[[str], object]):
        self.warn, self._path, self._tail = warn, path, b""
        reading, writing = os.pipe()
        self._stream = os.fdopen(writing, "w", buffering=1, encoding="utf-8", errors="replace")
        self._thread = threading.Thread(target=self._copy, args=(reading,), name="MCP log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def close(self) -> None:
        """Ends this process's end of the pipe: the log ends with the programs that hold the others."""
        self._stream.close()

    def last_line(self) -> str:
        """What the program said last, once it has ended."""
        self.close()
        self._thread.join(1.0)  # a program that it started may go on
        return excerpt(self._tail.decode(errors="replace").strip().rpartition("\n")[2])

    def _copy(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as source:
            while text := source.read(2**16):
                self._tail = (self._tail + text)[-_TAIL:]
                if self._path is not None:
                    with suppress(OSError):  # a full disk must not stop the server
                        self._path.parent.mkdir(parents=True, exist_ok=True)
                        set_aside(self._path)
                        with self._path.open("ab") as log:
                            log.write(text)


@asynccontextmanager
async def checked(transport: AbstractAsyncContextManager[Any], log: ServerLog) -> AsyncIterator[Any]:
    """The streams of a program's pipes; a line that cannot be read fails its call, or is warned of."""
    async with transport as (messages, requests):
        yield _Messages(messages, log), requests


class _Messages:
    """A stream of messages, without the errors of lines that are none."""

    def __init__(self, lines: Any, log: ServerLog):
        self._lines, self._log = lines, log

    async def receive(self) -> Any:
        return await self._next(self._lines.receive)

    async def _next(self, read: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            item = await read()
            if isinstance(item, ValueError):
                item = _message_of(item, self._log)
            if item is not None:
                return item

    async def aclose(self) -> None:
        await self._lines.aclose()

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return await self._next(self._lines.__anext__)

    async def __aenter__(self) -> _Messages:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _message_of(error: Any, log: ServerLog) -> Any:
    """The message of a line that the package refused; None: it is no reply to a call."""
    from mcp.shared.message import SessionMessage
    from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter

    line: Any = error.errors()[0]["input"]
    if error.errors()[0]["type"] == "json_invalid":
        try:  # one with lone surrogates
            whole = well_formed_json(line.encode("utf-8", "replace"))
            return SessionMessage(jsonrpc_message_adapter.validate_json(whole, by_name=False))
        except ValueError:
            call = _id_in(line)
    else:
        objects = [item["input"] for item in error.errors() if isinstance(item["input"], dict)]
        call, line = next((one["id"] for one in objects if "id" in one), None), str(line)
    if not isinstance(call, int | str):
        log.warn(excerpt(line))
        return None
    told = ErrorData(code=PARSE_ERROR, message=f"a reply that cannot be read: {excerpt(line)}")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=call, error=told))


def _id_in(line: str) -> int | None:
    """The call that a damaged reply belongs to: its id stands before its result or behind it."""
    if '"jsonrpc"' not in line:
        return None
    head, *rest = _RESULT.split(line, maxsplit=1)
    ids = _ID.findall(head) or _ID.findall("".join(rest))[-1:]
    return int(ids[0]) if ids else None


async def bound_reply(response: Any) -> None:
    """Hook of the package's HTTP client: a reply is read to a limit, and without lone surrogates."""
    from httpx2 import StreamError

    read = response.aiter_bytes

    async def read_whole(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        try:
            yield well_formed_json(await read_all(read(chunk_size)))
        except BadReply as error:
            raise StreamError(str(error)) from error

    # Of a stream the package itself bounds each event.
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        response.aiter_bytes = read_whole
