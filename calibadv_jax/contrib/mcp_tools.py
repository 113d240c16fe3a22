"""Tools of MCP servers as actions: one connection a server, made again where it is lost.

The optional package `mcp` is imported in functions. What servers send is bounded before the package reads it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio

from calibadv_jax.config import McpConfig
from calibadv_jax.core.errors import ActionRefused, EnvironmentFailure, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import printable, well_formed, well_formed_json
from calibadv_jax.core.trajectory import Document
from calibadv_jax.core.user_functions import failure
from calibadv_jax.services import http_client
from calibadv_jax.services.child_process import set_aside
from calibadv_jax.services.http_client import LONGEST_REPLY, BadReply, PerLoop, Unreachable, retry

TOKEN_VARIABLE = "MCP_TOKEN"
START_PATIENCE = 30.0  # seconds for which the start of a program waits for a server, at most
CLOSING = 10.0  # seconds that a connection may take to end
LONGEST_PURPOSE = 300  # letters of a tool's own description that stand in the prompt
LONGEST_EXCERPT = 200  # letters of a server's text in a message
MOST_BRACKETS = 100  # of a body
INVALID_PARAMS, CONNECTION_CLOSED = -32602, -32000  # codes of JSON-RPC and MCP
SESSION_ENDED, UNREADABLE_EVENT = "Session terminated", "SSE stream failed"  # messages of the package
_TAIL = 4096  # bytes of a log that are kept for messages

T = TypeVar("T")
Request = Callable[[Any], Awaitable[T]]  # of a client of the package


def mcp_actions(config: McpConfig, max_length: int, log: Path = Path(os.devnull)) -> list[Action]:
    """Return the tools of a server that are on; the server is started, or asked, and left again.

    The standard error of its program is added to `log`, and what it writes to its standard output that is no
    message. Raises UserError without the package, the server, or such a tool.
    """
    server = McpServer(config, log)
    tools = {tool.name: tool for tool in http_client.run_to_its_end(server.tools)}
    for name in config.tools:
        if name not in tools:
            names = printable(", ".join(tools)) or "none"
            raise UserError(f"tools: {server.where} has no tool {name!r}; it has {names}")
    chosen = [tools[name] for name in config.tools or tools]
    server.agreed = {tool.name: tool.input_schema for tool in chosen}
    return [McpAction(server, tool, max_length) for tool in chosen]


@dataclass
class _OfLoop:
    connection: _Connection | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class McpServer:
    """A server and its connection in each event loop."""

    def __init__(self, config: McpConfig, log: Path):
        self.config, self._log = config, log
        self.where = f"MCP server {config.url or config.command}"
        self.agreed: dict[str, Any] = {}  # schemas by tool: each connection must have these
        self._connections = PerLoop(_OfLoop)

    async def tools(self) -> list[Any]:
        """Return the server's description of its tools; raise UserError if it cannot be reached."""
        try:
            # A program that ends at once, such as one whose script is missing, is not waited for.
            patience = 0.0 if self.config.command else min(self.config.patience, START_PATIENCE)
            return await self._ask("", _list_tools, patience)
        except RequestFailed as error:
            start, key = ("start it, or ", "url") if self.config.url else ("", "command")
            raise UserError(f"{error}; {start}correct tools[].mcp.{key}") from error
        finally:
            await self.close()

    async def call(self, action: str, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return a tool's result; the service that fails is called `action`.

        Raises ActionRefused for arguments that the server does not take, RequestFailed if it was away for
        `config.patience` or late, EnvironmentFailure if it no longer has the tools of the start.
        """
        patience = self.config.patience
        try:
            result = await self._ask(action, lambda client: client.call_tool(tool, dict(arguments)), patience)
        except ActionRefused:
            self._compare(await self._ask(action, _list_tools, patience))
            raise
        if result.is_error:  # of the tool, or because it is gone
            self._compare(await self._ask(action, _list_tools, patience))
        return result

    async def _ask(self, action: str, request: Request[T], patience: float) -> T:
        async def attempt() -> T:
            return await (await self._connected()).ask(request)

        try:
            return await retry(attempt, patience)
        except (Unreachable, BadReply) as error:
            raise RequestFailed(action, f"{self.where}: {error}") from error

    async def _connected(self) -> _Connection:
        mine = self._connections.get()
        async with mine.opening:
            if mine.connection is None or not mine.connection.is_ready:
                if mine.connection is not None:
                    await mine.connection.close()
                mine.connection = _Connection(self.config, ServerLog(self._log))
                await mine.connection.open()
                if self.agreed:
                    self._compare(await mine.connection.ask(_list_tools))
                mine.connection.is_ready = True
            return mine.connection

    def _compare(self, tools: list[Any]) -> None:
        """Raise EnvironmentFailure if a tool that is on is gone, or has another schema."""
        schemas = {tool.name: tool.input_schema for tool in tools}
        for name, schema in self.agreed.items():
            if name not in schemas or schemas[name] != schema:
                change = "has another schema than at the start of this run" if name in schemas else "is gone"
                advice = "serve the tools that the run began with, or begin another run"
                raise EnvironmentFailure(f"{self.where}: its tool {name!r} {change}; {advice}")

    async def close(self) -> None:
        """End the connection of the running event loop, and the server that it started."""
        mine = self._connections.take()
        if mine is not None and mine.connection is not None:
            await mine.connection.close()


async def _list_tools(client: Any) -> list[Any]:
    page = await client.list_tools(cursor=None)
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


class _Connection:
    """A session with a server, in a task of its own: what opens it must also end it."""

    def __init__(self, config: McpConfig, log: ServerLog):
        self._config, self._log = config, log
        self.is_ready = False  # open, and its tools are those of the start
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def open(self) -> None:
        """Raise Unreachable if there is no MCP server, UserError if package or program are missing."""
        done, _ = await asyncio.wait({self._client}, timeout=self._config.timeout)
        if not done:
            await self.close()
            raise Unreachable(f"no session within {self._config.timeout:g} s")
        self._client.result()

    async def ask(self, request: Request[T]) -> T:
        """Raise ActionRefused for refused arguments, Unreachable for a lost connection, else BadReply."""
        limit = asyncio.timeout(self._config.timeout)
        try:
            async with limit:
                return await request(self._client.result())
        except _package().MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ActionRefused(error.message) from error
            is_unread = error.message.startswith(UNREADABLE_EVENT)
            if is_unread or (error.code != CONNECTION_CLOSED and error.message != SESSION_ENDED):
                raise BadReply(f"error {error.code}: {printable(error.message[:LONGEST_EXCERPT])}") from error
            self.is_ready = False
            raise Unreachable("the connection has ended") from error
        except (ValueError, RuntimeError) as error:  # a result against its schema
            raise (BadReply if self.is_ready else Unreachable)(_reason(error)) from error
        except Exception as error:  # the package raises whatever its connection does
            if limit.expired():
                raise BadReply(f"no reply within {self._config.timeout:g} s") from error
            self.is_ready = False
            raise Unreachable(_reason(error)) from error

    async def close(self) -> None:
        self.is_ready = False
        self._closing.set()
        if not self._client.cancel():  # what is still opening does not wait for `_closing`
            await asyncio.wait({self._task}, timeout=CLOSING)
        self._task.cancel()
        with suppress(BaseException):
            await self._task

    async def _keep(self) -> None:
        try:
            async with _client(self._config, self._log) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # whatever it is, the one who waits must know
            if not self._client.done():
                self._client.set_exception(self._failure(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.is_ready = False
            self._log.stream.close()  # this process's end; the log ends with the programs that hold others

    def _failure(self, error: BaseException) -> Exception:
        if isinstance(error, UserError):
            return error
        if isinstance(error, FileNotFoundError | PermissionError) and self._config.command:
            problem = f"cannot be started ({error.strerror}); correct tools[].mcp.command"
            return UserError(f"tools: {self._config.command!r} {problem}")
        line = self._log.last_line()
        return Unreachable(_reason(error) + (f" ({line})" if line else ""))


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return printable(failure(error))


def _package() -> Any:
    try:
        import mcp
    except ImportError as error:
        advice = "pip install 'calibadv-jax[mcp]'"
        raise UserError(f"tools: mcp needs the package mcp, which is not installed: {advice}") from error
    for logger in ("mcp", "client"):  # of the package: they write tracebacks with what a server sends
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return mcp


def _client(config: McpConfig, log: ServerLog) -> Any:
    mcp = _package()
    if config.command:
        from mcp.client.stdio import stdio_client

        program, *arguments = shlex.split(config.command)
        started = mcp.StdioServerParameters(
            command=program, args=arguments, env=dict(os.environ), encoding_error_handler="replace"
        )
        return mcp.Client(messages_only(stdio_client(started, errlog=log.stream), log), cache=None)
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    http = create_mcp_http_client(headers={"Authorization": f"Bearer {token}"} if token else None)
    http.event_hooks = {"response": [bound_reply]}
    streams = streamable_http_client(config.url, http_client=http, max_sse_event_size=LONGEST_REPLY)
    return mcp.Client(streams, cache=None)


class McpAction(Action):
    """A tool of a server: its body is a JSON object of arguments, or the only argument, if that is a text."""

    def __init__(self, server: McpServer, tool: Any, max_length: int):
        self._server, self._tool = server, tool.name
        schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
        properties = schema.get("properties") or {}
        types = {name: _type(value) for name, value in properties.items()}
        self._only = next(iter(types)) if list(types.values()) == ["string"] else ""
        described = " ".join((tool.description or "").split())[:LONGEST_PURPOSE].rstrip(".")
        self.name = re.sub(r"\W", "_", tool.name, flags=re.ASCII)
        self.purpose = f"use {self.name} ({described})" if described else f"use {self.name}"
        fields = ", ".join(f'"{name}": {kind}' for name, kind in types.items())
        self.argument, self.max_length = self._only or f"{{{fields}}}", max_length
        self.may_be_empty = not set(schema.get("required") or []) & set(types)

    def parse(self, body: str) -> dict[str, Any]:
        if not body:
            return {}
        if body.count("{") + body.count("[") > MOST_BRACKETS:
            raise ValueError("too many brackets")
        body = well_formed(body)
        with suppress(ValueError):
            if isinstance(value := json.loads(well_formed_json(body.encode()).decode()), dict):
                return value
        if self._only:
            return {self._only: body}
        raise ValueError(f"write a JSON object: {self.argument}")

    async def call(self, argument: dict[str, Any]) -> Reply:
        result = await self._server.call(self.name, self._tool, argument)
        texts, documents = [], []
        for block in result.content:
            resource: Any = getattr(block, "resource", None)
            if block.type == "text":
                texts.append(block.text)
            elif isinstance(getattr(resource, "text", None), str):
                documents.append(Document(str(resource.uri), str(resource.uri), resource.text))
            elif block.type == "resource_link":
                texts.append(f"{block.name}: {block.uri}")
            else:
                texts.append(f"[{block.type}]")
        if not result.content and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        if result.is_error:
            raise ActionRefused("\n".join(texts))
        return Reply(tuple(documents), "\n".join(texts))

    async def close(self) -> None:
        await self._server.close()


def _type(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind if isinstance(kind, str) else "value"


class ServerLog:
    """The standard error of a server's program, a pipe whose text is added to a file."""

    def __init__(self, path: Path):
        self._path, self._tail = path, b""
        reading, writing = os.pipe()
        self.stream = os.fdopen(writing, "wb", buffering=0)
        self._thread = threading.Thread(target=self._copy, args=(reading,), name="MCP log", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line of the program's output, once it has ended."""
        self.stream.close()
        self._thread.join(1.0)  # a program that it started may go on
        last = self._tail.decode(errors="replace").strip().rpartition("\n")[2]
        return printable(last[:LONGEST_EXCERPT])

    def _copy(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as source:
            while text := source.read(2**16):
                self._tail = (self._tail + text)[-_TAIL:]
                with suppress(OSError):  # a full disk must not stop the server
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    set_aside(self._path)
                    with self._path.open("ab") as log:
                        log.write(text)


@asynccontextmanager
async def messages_only(transport: AbstractAsyncContextManager[Any], log: ServerLog) -> AsyncIterator[Any]:
    """Open the streams of a program's pipes; repair lone surrogates, and log other lines that are no message.

    The package would drop both. A call whose reply is such a line has none.
    """
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    readable, messages = anyio.create_memory_object_stream[Any]()

    async def forward(lines: Any) -> None:
        async with readable:
            async for item in lines:
                if isinstance(item, ValueError):
                    line = str(item.errors()[0]["input"])  # type: ignore[attr-defined] # pydantic's
                    try:
                        repaired = well_formed_json(line.encode("utf-8", "replace"))
                        item = SessionMessage(jsonrpc_message_adapter.validate_json(repaired, by_name=False))
                    except ValueError:
                        log.stream.write(f"no message of MCP: {line}\n".encode(errors="replace"))
                        continue
                await readable.send(item)

    async with transport as (lines, requests), messages, anyio.create_task_group() as tasks:
        tasks.start_soon(forward, lines)
        yield messages, requests
        tasks.cancel_scope.cancel()


async def bound_reply(response: Any) -> None:
    """Bound a reply of the package's HTTP client, and replace lone surrogates in it."""
    from httpx2 import StreamError

    read = response.aiter_bytes

    async def read_whole(chunk_size: int | None = None) -> AsyncIterator[bytes]:
        try:
            yield well_formed_json(await http_client.read_all(read(chunk_size)))
        except BadReply as error:
            raise StreamError(str(error)) from error

    # Of a stream the package itself bounds each event.
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        response.aiter_bytes = read_whole
