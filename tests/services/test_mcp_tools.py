"""Tools of a real MCP server as actions: on its pipes and over HTTP, and what a bad server cannot do."""

import asyncio
import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from calibadv_jax.config import Config, McpConfig, ToolConfig
from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.run.actions import make_actions
from calibadv_jax.services import mcp_tools, waiting

pytest.importorskip("mcp")
SERVER = str(Path(__file__).parent / "mcp_server.py")
COMMAND = shlex.join([sys.executable, SERVER])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def over_http():
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["pipes", "http"])
def server(request):
    """A config of the server, and its actions by name."""
    if request.param == "pipes":
        config = McpConfig(command=COMMAND, timeout=20)
        yield config, {one.name: one for one in mcp_tools.mcp_actions(config, 0)}
        return
    with over_http() as url:
        config = McpConfig(url=url, timeout=20)
        yield config, {one.name: one for one in mcp_tools.mcp_actions(config, 0)}


def asked(config, action, *bodies):
    """What each body brings, over one connection."""

    async def ask():
        outcomes = []
        for body in bodies:
            try:
                reply = await action.call(action.parse(body))
                outcomes.append(reply)
            except (ActionRefused, RequestFailed) as error:
                outcomes.append(error)
        await action.close()
        return outcomes

    action._server.config = config
    return asyncio.run(ask())


@pytest.mark.slow
def test_a_servers_tools_are_actions(server):
    config, actions = server
    assert set(actions) >= {"weather", "add", "slow_one"}  # a tag has no hyphen
    assert actions["weather"].argument == "city" and actions["large"].may_be_empty
    assert actions["add"].argument == '{"left": integer, "right": integer}'
    plain, as_json = asked(config, actions["weather"], "Rome", '{"city": "Oslo"}')
    assert (plain.text, as_json.text) == ("sunny in Rome", "sunny in Oslo")
    body = json.dumps({"left": 2, "right": 3})
    found, of_tool, of_schema, hostile = asked(
        config, actions["add"], body, '{"left": -1, "right": 3}', '{"left": "x"}', '{"left": "\\ud800"}'
    )
    assert found.text == "5"
    # The policy reads why, and goes on; nothing of it ends the connection.
    assert isinstance(of_tool, ActionRefused) and "add" in str(of_tool)
    assert isinstance(of_schema, ActionRefused) and isinstance(hostile, ActionRefused)
    (large,) = asked(config, actions["large"], "")
    assert len(large.text) > 10_000_000
    (book,) = asked(config, actions["book"], "")
    assert [(one.id, one.text) for one in book.documents] == [("shelf://book", "<search> a page </search>")]


@pytest.mark.slow
def test_a_tool_that_is_too_slow_fails_its_trajectory_only(server, monkeypatch):
    config, actions = server
    monkeypatch.setattr(waiting, "BAD_REPLIES", 1)
    slow, quick = asked(replace(config, timeout=3), actions["slow_one"], '{"seconds": 60}', '{"seconds": 0}')
    assert (
        isinstance(slow, RequestFailed) and slow.service == "slow_one" and "no reply within 3 s" in str(slow)
    )
    assert quick.text == "late"


@pytest.mark.slow
def test_a_server_that_dies_is_started_again():
    config = McpConfig(command=COMMAND, timeout=20, patience=0.1)
    die, process = mcp_tools.mcp_actions(replace(config, tools=["die", "process"]), 0)

    async def ask():
        before = await process.call({})
        with pytest.raises(RequestFailed) as failure:
            await die.call({})
        after = await process.call({})
        await process.close()
        return before.text, after.text, failure.value

    before, after, failure = asyncio.run(ask())
    assert before != after and failure.service == "die"


def test_what_cannot_be_started_is_said():
    def made(**mcp):
        return make_actions(Config(tools=[ToolConfig(mcp=McpConfig(**mcp))]))

    with pytest.raises(UserError, match=r"'/nowhere/server' cannot be started .*\[\].mcp.command"):
        made(command="/nowhere/server")
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(UserError, match=rf"MCP server {re.escape(url)}: .*correct tools\[\].mcp.url"):
        made(url=url, patience=0.01)


def test_the_package_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'calibadv-jax\[mcp\]'"):
        mcp_tools.mcp_actions(McpConfig(command="python"), 0)
