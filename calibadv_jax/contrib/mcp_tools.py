"""Tools of MCP servers as actions: one connection a server, made again where it is lost.

The package `mcp` is optional; only what is in use of it is imported, in functions.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from calibadv_jax.config import McpConfig
from calibadv_jax.contrib.mcp_streams import ServerLog, bound_reply, checked, excerpt
from calibadv_jax.core.errors import ActionRefused, EnvironmentFailure, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import printable, well_formed
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.http_client import LONGEST_REPLY
from calibadv_jax.services.waiting import Waits, run_to_its_end

TOKEN_VARIABLE = "MCP_TOKEN"
START_PATIENCE = 30.0  # seconds for which the start of a program waits for a server, at most
CLOSING = 10.0  # seconds that a connection may take to end
LONGEST_PURPOSE = 300  # letters of a tool's own description that stand in the prompt
MOST_BRACKETS = 100  # of a body
INVALID_PARAMS, CONNECTION_CLOSED = -32602, -32000  # JSON-RPC's and MCP's codes
SESSION_ENDED, UNREADABLE_EVENT = "Session terminated", "SSE stream failed"  # messages of the package
LOGGERS = ("mcp", "client")  # of the package

T = TypeVar("T")


class Lost(Exception):
    """The server cannot be reached, or its connection has ended."""


def mcp_actions(
    config: McpConfig,
    max_length: int,
    log: Path | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> list[Action]:
    """The tools of a server that are on; the server is started, or asked, and left again.

    Args:
        log: the standard error of the server's program is added to it; see `ServerLog`.
        warn: told once if the program writes to its standard output what is no message.

    Raises:
        UserError: the package is missing, the server cannot be started or reached, or has no such tool.
    """
    server = McpServer(config, log, warn)
    known = {tool.name: tool for tool in run_to_its_end(server.tools)}
    for name in config.tools:
        if name not in known:
            raise UserError(
                f"tools: {server.where} has no tool {name!r}; it has {printable(', '.join(known)) or 'none'}"
            )
    names = config.tools or list(known)
    server.agreed = {name: known[name].input_schema for name in names}
    return [McpAction(server, known[name], max_length) for name in names]


class McpServer:
    """A server and its connection, which belongs to the event loop that runs when it is asked."""

    def __init__(
        self,
        config: McpConfig,
        log: Path | None = None,
        warn: Callable[[str], object] = lambda _: None,
    ):
        self.config, self._log, self._warn = config, log, warn
        self.where = f"MCP server {config.url or config.command}"
        self.agreed: dict[str, Any] = {}  # schemas by tool: each connection must have these
        self._has_warned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()

    async def tools(self) -> list[Any]:
        """What the server says of its tools.

        Raises:
            UserError: it cannot be started or reached.
        """
        try:
            # A program that ends at once, such as one whose script is missing, is not waited for.
            patience = 0.0 if self.config.command else min(self.config.patience, START_PATIENCE)
            return await self._ask("", _list_tools, patience)
        except RequestFailed as error:
            advice = (
                "start it, or correct tools[].mcp.url" if self.config.url else "correct tools[].mcp.command"
            )
            raise UserError(f"{error}; {advice}") from error
        finally:
            await self.close()

    async def call(self, action: str, tool: str, arguments: Mapping[str, Any]) -> Any:
        """A tool's result.

        Args:
            action: who failed, if it fails.

        Raises:
            ActionRefused: the server does not take these arguments.
            RequestFailed: it was away for longer than `config.patience`, or did not answer in time.
            EnvironmentFailure: it no longer has the tools that it had at the start.
        """

        async def ask(client: Any) -> Any:
            return await client.call_tool(tool, dict(arguments))

        try:
            result = await self._ask(action, ask, self.config.patience)
        except ActionRefused:
            await self._compare_now(action)
            raise
        if result.is_error:  # of the tool, or because it is gone
            await self._compare_now(action)
        return result

    async def _compare_now(self, action: str) -> None:
        self._compare(await self._ask(action, _list_tools, self.config.patience))

    async def _ask(self, action: str, ask: Callable[[Any], Awaitable[T]], patience: float) -> T:
        waits = Waits(patience)
        while True:
            try:
                connection = await self._connected()
                return await connection.ask(ask, self.config.timeout)
            except Lost as error:
                reason, goes_on = str(error), await waits.for_a_service(0)
            except TimeoutError:
                reason, goes_on = f"no reply within {self.config.timeout:g} s", await waits.for_a_good_reply()
            except _BadReply as error:
                reason, goes_on = str(error), await waits.for_a_good_reply()
            if not goes_on:
                raise RequestFailed(action, f"{self.where}: {reason}")

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a connection belongs to the loop that opened it
            self._loop, self._connection, self._opening = loop, None, asyncio.Lock()
        async with self._opening:
            if self._connection is None or self._connection.is_lost:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = _Connection(self.config, self._log, self._warn_once)
                await self._connection.open()
            if self.agreed and not self._connection.is_compared:
                self._compare(await self._connection.ask(_list_tools, self.config.timeout))
                self._connection.is_compared = True
            return self._connection

    def _compare(self, tools: list[Any]) -> None:
        """
        Raises:
            EnvironmentFailure: a tool that is on is gone, or has another schema.
        """
        schemas = {tool.name: tool.input_schema for tool in tools}
        for name, schema in self.agreed.items():
            if name not in schemas or schemas[name] != schema:
                change = "has another schema than at the start of this run" if name in schemas else "is gone"
                raise EnvironmentFailure(
                    f"{self.where}: its tool {name!r} {change}; serve the tools that the run began with, or"
                    " begin another run"
                )

    def _warn_once(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.where} writes to its standard output what is no message of MCP ({line!r}), and is not"
                " heard there; have it write to standard error"
            )

    async def close(self) -> None:
        """Ends the connection of the running event loop, and the server that it started."""
        if self._loop is asyncio.get_running_loop() and self._connection is not None:
            await self._connection.close()
            self._connection = None


async def _list_tools(client: Any) -> list[Any]:
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


class _BadReply(Exception):
    """The server answered with an error that is not about the arguments, or with what cannot be read."""


class _Connection:
    """A session with a server, in a task of its own: what opens it must also end it."""

    def __init__(self, config: McpConfig, log: Path | None, warn: Callable[[str], object]):
        self.config, self.is_lost = config, False
        self.is_compared = False  # its tools with those of the start
        self._log, self._warn = log, warn
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """
        Raises:
            Lost: there is no server, or it does not speak MCP.
            UserError: the package is missing, or there is no such program.
        """
        self._task = asyncio.create_task(self._keep())
        done, _ = await asyncio.wait({self._client}, timeout=self.config.timeout)
        if not done:
            await self.close()
            raise Lost(f"no session within {self.config.timeout:g} s")
        self._client.result()

    async def ask(self, ask: Callable[[Any], Awaitable[T]], timeout: float) -> T:
        """
        Raises:
            ActionRefused, TimeoutError, Lost, _BadReply.
        """
        errors = _package().MCPError
        client = self._client.result()
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await ask(client)
        except errors as error:
            if error.code == INVALID_PARAMS:
                raise ActionRefused(error.message) from error
            is_unread = error.message.startswith(UNREADABLE_EVENT)
            if is_unread or (error.code != CONNECTION_CLOSED and error.message != SESSION_ENDED):
                raise _BadReply(f"error {error.code}: {excerpt(error.message)}") from error
            self.is_lost = True
            raise Lost("the connection has ended") from error
        except (ValueError, RuntimeError) as error:  # a result against its schema
            if self.is_lost:
                raise Lost(_reason(error)) from error
            raise _BadReply(_reason(error)) from error
        except Exception as error:  # the package raises whatever its connection does
            if limit.expired():
                raise
            self.is_lost = True
            raise Lost(_reason(error)) from error

    async def close(self) -> None:
        self.is_lost = True
        self._closing.set()
        if self._task is not None:
            if not self._client.cancel():  # what is still opening does not wait for `_closing`
                await asyncio.wait({self._task}, timeout=CLOSING)
            self._task.cancel()
            with suppress(BaseException):
                await self._task

    async def _keep(self) -> None:
        log = ServerLog(self._log, self._warn)
        try:
            async with _client(self.config, log) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # whatever it is, the one who waits must know
            if not self._client.done():
                self._client.set_exception(self._failure(error, log))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.is_lost = True
            log.close()

    def _failure(self, error: BaseException, log: ServerLog) -> Exception:
        if isinstance(error, UserError):
            return error
        if isinstance(error, FileNotFoundError | PermissionError) and self.config.command:
            return UserError(
                f"tools: {self.config.command!r} cannot be started ({error.strerror}); correct"
                " tools[].mcp.command"
            )
        line = log.last_line()
        return Lost(f"{_reason(error)}{f' ({line})' if line else ''}")


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return printable(f"{type(error).__name__} {error}"[:1000])[:300]


def _package() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise UserError(
            "tools: mcp needs the package mcp, which is not installed: pip install 'calibadv-jax[mcp]'"
        ) from error
    for logger in LOGGERS:  # they write tracebacks with what a server sends
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return mcp


def _client(config: McpConfig, log: ServerLog) -> Any:
    """An asynchronous context whose value is the client."""
    mcp = _package()
    if config.command:
        from mcp.client.stdio import stdio_client

        program, *arguments = shlex.split(config.command)
        started = mcp.StdioServerParameters(
            command=program, args=arguments, env=dict(os.environ), encoding_error_handler="replace"
        )
        return mcp.Client(checked(stdio_client(started, errlog=log), log), cache=None)
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    http = create_mcp_http_client(headers={"Authorization": f"Bearer {token}"} if token else None)
    http.event_hooks = {"response": [bound_reply]}
    limit = "max_sse_event_size"  # older versions of the package have none
    known = inspect.signature(streamable_http_client).parameters
    bounds = {limit: LONGEST_REPLY} if limit in known else {}
    return mcp.Client(streamable_http_client(config.url, http_client=http, **bounds), cache=None)


class McpAction(Action):
    """A tool of a server: its body is a JSON object of arguments, or the only argument, if that is a text."""

    def __init__(self, server: McpServer, tool: Any, max_length: int):
        self._server, self._tool = server, tool.name
        schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
        properties = schema.get("properties") or {}
        required = [name for name in schema.get("required") or [] if name in properties]
        texts = [name for name in properties if _type(properties[name]) == "string"]
        self._only = texts[0] if len(properties) == 1 and texts else ""
        described = " ".join((tool.description or "").split())[:LONGEST_PURPOSE].rstrip(".")
        self.name = re.sub(r"\W", "_", tool.name, flags=re.ASCII)
        self.purpose = f"use {self.name} ({described})" if described else f"use {self.name}"
        named = ", ".join(f'"{name}": {_type(one)}' for name, one in properties.items())
        self.argument = self._only or f"{{{named}}}"
        self.may_be_empty, self.max_length = not required, max_length

    def parse(self, body: str) -> dict[str, Any]:
        if not body:
            return {}
        if body.count("{") + body.count("[") > MOST_BRACKETS:
            raise ValueError("too many brackets")
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return _well_formed(found)
        if self._only:
            return {self._only: well_formed(body)}
        raise ValueError(f"write a JSON object: {self.argument}")

    async def call(self, argument: dict[str, Any]) -> Reply:
        result = await self._server.call(self.name, self._tool, argument)
        texts, documents = [], []
        for block in result.content:
            resource = getattr(block, "resource", None)
            if block.type == "text":
                texts.append(block.text)
            elif resource is not None and isinstance(getattr(resource, "text", None), str):
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


def _well_formed(value: Any) -> Any:
    """JSON without lone surrogates, which a connection cannot send."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed(name): _well_formed(one) for name, one in value.items()}
    return [_well_formed(one) for one in value] if isinstance(value, list) else value
