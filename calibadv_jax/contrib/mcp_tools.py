"""Tools of MCP servers as actions.

There is one connection to each server. A connection that is lost is opened again. The optional package `mcp`
is imported in functions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from calibadv_jax.config import McpConfig
from calibadv_jax.contrib.mcp_streams import LONGEST_EXCERPT, ServerLog, bound_reply, messages_only
from calibadv_jax.core.errors import ActionRefused, EnvironmentFailure, RequestFailed, UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import to_printable_line, well_formed, well_formed_json
from calibadv_jax.core.trajectory import Document
from calibadv_jax.core.user_functions import describe_failure
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import LONGEST_REPLY, BadReply, PerLoop, Unreachable, retry

TOKEN_VARIABLE = "MCP_TOKEN"  # Environment variable with the bearer token of servers with a URL.
START_PATIENCE = 30.0  # Seconds for which the start of a run waits for a server, at most.
CLOSING_SECONDS = 10.0  # Seconds that a connection may take to end.
LONGEST_PURPOSE = 300  # Characters of a tool's own description that stand in the prompt.
LONGEST_DESCRIPTION = 2000  # The same where the tool stands in a chat template.
MOST_BRACKETS = 100  # Brackets in the body of an action, at most.
INVALID_PARAMS = -32602  # Error code of JSON-RPC: the arguments do not fit.
CONNECTION_CLOSED = -32000  # Error code of the package: the connection has ended.
SESSION_ENDED = "Session terminated"  # Message of the package: the server has forgotten the session.
UNREADABLE_EVENT = "SSE stream failed"  # Message of the package: an event could not be read.

T = TypeVar("T")
Request = Callable[[Any], Awaitable[T]]  # Sends a request, given a client of the package.


def mcp_actions(config: McpConfig, max_length: int, log: Path = Path(os.devnull)) -> list[Action]:
    """Return the tools of a server that are on, as actions.

    The server is started, if it is a program, and asked for its tools. The connection is closed again.

    Args:
        config: the section `mcp` of an entry of `tools`.
        max_length: tokens of an observation; 0: rollout.max_observation_length.
        log: file to which the standard error of the server's program is added, and lines of its standard
            output that are no message.

    Raises:
        UserError: if the package is not installed, the server cannot be reached, or it lacks a tool.
    """
    server = McpServer(config, log)
    tools = {tool.name: tool for tool in http_client.run_coroutine(server.tools)}
    for name in config.tools:
        if name not in tools:
            names = to_printable_line(", ".join(tools)) or "none"
            raise UserError(f"tools: {server.where} has no tool {name!r}; it has {names}")
    chosen = [tools[name] for name in config.tools or tools]
    server.agreed = {tool.name: tool.input_schema for tool in chosen}
    return [McpAction(server, tool, max_length) for tool in chosen]


@dataclass
class _LoopConnection:
    """The connection of one event loop."""

    connection: _Connection | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the connection is opened


class McpServer:
    """A server, with a connection in each event loop that uses it.

    Args:
        config: the section `mcp` of an entry of `tools`.
        log: file for the output of the server's program, see `mcp_actions`.
    """

    def __init__(self, config: McpConfig, log: Path):
        self.config = config
        self._log = log
        self.where = f"MCP server {config.url or config.command}"
        # Tool -> schema of its arguments, for the tools that are on: each connection must have these.
        self.agreed: dict[str, Any] = {}
        self._connections = PerLoop(_LoopConnection)

    async def tools(self) -> list[Any]:
        """Return the server's descriptions of its tools, and close the connection.

        Raises:
            UserError: if the package is not installed, or the server cannot be reached.
        """
        patience = min(self.config.patience, START_PATIENCE)
        if self.config.command:
            patience = 0.0  # a program that ends at once, as without its script, is not waited for
        try:
            return await self._ask("", _list_tools, patience)
        except RequestFailed as error:
            if self.config.url:
                raise UserError(f"{error}; start it, or correct tools[].mcp.url") from error
            raise UserError(f"{error}; correct tools[].mcp.command") from error
        finally:
            await self.close()

    async def call(self, action: str, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool.

        Args:
            action: name of the action, for the error of a failed trajectory.
            tool: name of the tool at the server.
            arguments: the tool's arguments.

        Returns:
            The package's result.

        Raises:
            ActionRefused: if the server does not take the arguments.
            RequestFailed: if the server was away for `config.patience`, or late.
            EnvironmentFailure: if the server no longer has the tools that it had at the start.
        """

        async def request(client: Any) -> Any:
            return await client.call_tool(tool, dict(arguments))

        patience = self.config.patience
        try:
            result = await self._ask(action, request, patience)
        except ActionRefused:
            self._compare(await self._ask(action, _list_tools, patience))
            raise
        if result.is_error:  # either the tool failed, or it no longer exists
            self._compare(await self._ask(action, _list_tools, patience))
        return result

    async def _ask(self, action: str, request: Request[T], patience: float) -> T:
        """Send a request; repeat it while the server is away."""

        async def attempt() -> T:
            connection = await self._connected()
            return await connection.ask(request)

        try:
            return await retry(attempt, patience)
        except (Unreachable, BadReply) as error:
            raise RequestFailed(action, f"{self.where}: {error}") from error

    async def _connected(self) -> _Connection:
        """Return the connection of the running event loop; open it if there is none, or it was lost."""
        current = self._connections.get()
        async with current.opening:
            if current.connection is not None and current.connection.is_ready:
                return current.connection
            if current.connection is not None:
                await current.connection.close()
            connection = _Connection(self.config, ServerLog(self._log))
            current.connection = connection
            await connection.open()
            if self.agreed:
                self._compare(await connection.ask(_list_tools))
            connection.is_ready = True
            return connection

    def _compare(self, tools: list[Any]) -> None:
        """Raise EnvironmentFailure if a tool that is on is gone, or has another schema."""
        schemas = {tool.name: tool.input_schema for tool in tools}
        for name, schema in self.agreed.items():
            if name not in schemas:
                self._refuse_change(f"its tool {name!r} is gone")
            if schemas[name] != schema:
                self._refuse_change(f"its tool {name!r} has another schema than at the start of this run")

    def _refuse_change(self, change: str) -> NoReturn:
        raise EnvironmentFailure(
            f"{self.where}: {change}; serve the tools that the run began with, or begin another run"
        )

    async def close(self) -> None:
        """End the connection of the running event loop, and the server that it started."""
        current = self._connections.take()
        if current is not None and current.connection is not None:
            await current.connection.close()


async def _list_tools(client: Any) -> list[Any]:
    """Return the tools of all pages."""
    page = await client.list_tools(cursor=None)
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


class _Connection:
    """A session with a server.

    It is opened and closed in a task of its own, since the package requires that the same task does both.
    """

    def __init__(self, config: McpConfig, log: ServerLog):
        self._config = config
        self._log = log
        self.is_ready = False  # whether it is open, and the server has the tools that it had at the start
        self._closing = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep())

    async def open(self) -> None:
        """Wait until the session is open.

        Raises:
            Unreachable: if there is no MCP server.
            UserError: if the package or the server's program is missing.
        """
        done, _ = await asyncio.wait({self._client}, timeout=self._config.timeout)
        if not done:
            await self.close()
            raise Unreachable(f"no session within {self._config.timeout:g} s")
        self._client.result()

    async def ask(self, request: Request[T]) -> T:
        """Send a request, and return its result.

        Raises:
            ActionRefused: if the server does not take the arguments.
            Unreachable: if the connection is lost.
            BadReply: for any other failure.
        """
        limit = asyncio.timeout(self._config.timeout)
        try:
            async with limit:
                return await request(self._client.result())
        except _package().MCPError as error:
            self._raise_for(error)
        except (ValueError, RuntimeError) as error:  # a result that does not fit its schema
            if self.is_ready:
                raise BadReply(_reason(error)) from error
            raise Unreachable(_reason(error)) from error
        except Exception as error:  # the package may raise anything that its connection does
            if limit.expired():
                raise BadReply(f"no reply within {self._config.timeout:g} s") from error
            self.is_ready = False
            raise Unreachable(_reason(error)) from error

    def _raise_for(self, error: Any) -> NoReturn:
        """Raise the error that stands for an MCPError of the package."""
        if error.code == INVALID_PARAMS:
            raise ActionRefused(error.message) from error
        is_unread = error.message.startswith(UNREADABLE_EVENT)
        is_lost = error.code == CONNECTION_CLOSED or error.message == SESSION_ENDED
        if is_unread or not is_lost:
            raise BadReply(
                f"error {error.code}: {to_printable_line(error.message[:LONGEST_EXCERPT])}"
            ) from error
        self.is_ready = False
        raise Unreachable("the connection has ended") from error

    async def close(self) -> None:
        """End the session, and the program that it started."""
        self.is_ready = False
        self._closing.set()
        # A session that is still opening does not wait for `_closing`: its task is cancelled at once.
        is_opening = self._client.cancel()
        if not is_opening:
            await asyncio.wait({self._task}, timeout=CLOSING_SECONDS)
        self._task.cancel()
        with suppress(BaseException):
            await self._task

    async def _keep(self) -> None:
        """Open the session, and hold it until `close`."""
        try:
            async with _client(self._config, self._log) as client:
                self._client.set_result(client)
                await self._closing.wait()
        except BaseException as error:  # any error must reach `open`, which waits for the client
            if not self._client.done():
                self._client.set_exception(self._failure(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.is_ready = False
            # This closes the end of this process. The log ends once the programs that hold other ends do.
            self._log.stream.close()

    def _failure(self, error: BaseException) -> Exception:
        """Return the error that `open` raises if opening the session fails."""
        if isinstance(error, UserError):
            return error
        if isinstance(error, FileNotFoundError | PermissionError) and self._config.command:
            return UserError(
                f"tools: {self._config.command!r} cannot be started ({error.strerror}); correct"
                " tools[].mcp.command"
            )
        reason = _reason(error)
        last_line = self._log.last_line()
        if last_line:
            reason = f"{reason} ({last_line})"
        return Unreachable(reason)


def _reason(error: BaseException) -> str:
    """Return an error as one line; of a group of errors, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return to_printable_line(describe_failure(error))


def _package() -> Any:
    """Import the package `mcp`, and silence its logs."""
    try:
        import mcp
    except ImportError as error:
        raise UserError(
            "tools: mcp needs the package mcp, which is not installed: pip install 'calibadv-jax[mcp]'"
        ) from error
    # The package's loggers would write tracebacks that contain what a server sends.
    for logger in ("mcp", "client"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    return mcp


def _client(config: McpConfig, log: ServerLog) -> Any:
    """Return a client of the package for a server: one that starts its program, or one for its URL."""
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
    """A tool of a server.

    The body of the action is a JSON object of arguments. If the only argument is a text, the body may also be
    that text.

    Args:
        server: the server.
        tool: the package's description of the tool.
        max_length: tokens of an observation; 0: rollout.max_observation_length.
    """

    def __init__(self, server: McpServer, tool: Any, max_length: int):
        self._server = server
        self._tool = tool.name
        schema = tool.input_schema if isinstance(tool.input_schema, dict) else {}
        properties = schema.get("properties") or {}
        types = {name: _type_name(value) for name, value in properties.items()}
        # Name of the only argument, if there is one and it is a text.
        self._only = ""
        if list(types.values()) == ["string"]:
            self._only = next(iter(types))
        self.name = re.sub(r"\W", "_", tool.name, flags=re.ASCII)
        self.purpose = f"use {self.name}"
        description = " ".join((tool.description or "").split())[:LONGEST_PURPOSE].rstrip(".")
        if description:
            self.purpose = f"use {self.name} ({description})"
        fields = ", ".join(f'"{name}": {type_name}' for name, type_name in types.items())
        self.argument = self._only or f"{{{fields}}}"
        self.max_length = max_length
        required = set(schema.get("required") or [])
        self.may_be_empty = not required & set(types)
        self.description = (tool.description or "").strip()[:LONGEST_DESCRIPTION]
        self.parameters = {"type": "object", **schema}

    def parse(self, body: str) -> dict[str, Any]:
        """Return the arguments of the tool.

        Args:
            body: a JSON object, or the text of the only argument; "": no arguments.

        Raises:
            ValueError: if the body is neither, or has too many brackets.
        """
        if not body:
            return {}
        if body.count("{") + body.count("[") > MOST_BRACKETS:
            raise ValueError("too many brackets")
        body = well_formed(body)
        with suppress(ValueError):
            value = json.loads(well_formed_json(body.encode()).decode())
            if isinstance(value, dict):
                return value
        if self._only:
            return {self._only: body}
        raise ValueError(f"write a JSON object: {self.argument}")

    async def call(self, argument: dict[str, Any]) -> Reply:
        """Call the tool.

        Args:
            argument: the tool's arguments, from `parse`.

        Returns:
            The texts of the result, one a line, and its resources with a text as documents. Structured
            content follows the texts unless they hold it: some servers send it as text too, others only
            announce it.

        Raises:
            ActionRefused: if the server does not take the arguments, or the tool reports an error.
            RequestFailed: if the server gives no reply.
            EnvironmentFailure: if the server no longer has the tools that it had at the start.
        """
        result = await self._server.call(self.name, self._tool, argument)
        texts = []
        documents = []
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
        structured = result.structured_content
        shown = [*texts, *(document.text for document in documents)]
        if structured is not None and not _is_shown(structured, shown):
            texts.append(json.dumps(structured, ensure_ascii=False))
        text = "\n".join(texts)
        if result.is_error:
            raise ActionRefused(text)
        return Reply(tuple(documents), text)

    async def close(self) -> None:
        """Close the connection of the server in the running event loop."""
        await self._server.close()


def _is_shown(structured: Any, texts: list[str]) -> bool:
    """Return whether texts hold structured content, as JSON or, below its only key, a text for each item."""
    contents = [_from_json(text) for text in texts]
    forms = [structured]
    if isinstance(structured, dict) and len(structured) == 1:  # servers wrap a value that is no object
        forms += structured.values()
    for form in forms:
        items = form if isinstance(form, list) else [form]
        if form in contents or form == "\n".join(texts) or items in (contents, texts):
            return True
    return False


def _from_json(text: str) -> Any:
    """Return the value of a text of JSON; other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _type_name(schema: Any) -> str:
    """Return the type of an argument, or "value" if its schema does not name one."""
    name = schema.get("type") if isinstance(schema, dict) else None
    return name if isinstance(name, str) else "value"
