"""Tools of a real MCP server of the package as actions: on its pipes and over HTTP."""

import asyncio
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts_rig import free_port
from mcp_calls import call_in_one_connection

from calibadv_jax.config import McpConfig
from calibadv_jax.contrib import mcp_tools
from calibadv_jax.core.errors import ActionRefused, RequestFailed
from calibadv_jax.services import http_client

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).parent / "mcp_server.py")
COMMAND = shlex.join([sys.executable, SERVER])


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
        config = McpConfig(command=COMMAND, timeout=250)
        yield config, {action.name: action for action in mcp_tools.mcp_actions(config, 0)}
        return
    with over_http() as url:
        config = McpConfig(url=url, timeout=250)
        yield config, {action.name: action for action in mcp_tools.mcp_actions(config, 0)}


def test_tools_of_a_real_server_are_actions(server):
    config, actions = server
    assert set(actions) >= {"weather", "add", "slow_one"}
    assert actions["weather"].argument == "city" and actions["large"].may_be_empty
    assert actions["add"].argument == '{"left": integer, "right": integer}'
    plain, as_json = call_in_one_connection(config, actions["weather"], "Rome", '{"city": "Oslo"}')
    assert (plain.text, as_json.text) == ("sunny in Rome", "sunny in Oslo")


def test_refused_arguments_do_not_end_the_connection(server):
    config, actions = server
    bodies = ('{"left": -1, "right": 3}', '{"left": "x"}', '{"left": "\\ud800"}', '{"left": 2, "right": 3}')
    *refused, total = call_in_one_connection(config, actions["add"], *bodies)
    assert {type(error) for error in refused} == {ActionRefused}
    assert "add" in str(refused[0])
    assert total.text == "5"


def test_long_replies_and_documents_are_read(server):
    config, actions = server
    (large,) = call_in_one_connection(config, actions["large"], "")
    assert len(large.text) > 10_000_000
    (book,) = call_in_one_connection(config, actions["book"], "")
    (document,) = book.documents
    assert (document.id, document.text) == ("shelf://book", "<search> a page </search>")


def test_slow_tool_of_a_real_server_fails_its_trajectory_only(server, monkeypatch):
    config, actions = server
    monkeypatch.setattr(http_client, "BAD_REPLIES", 1)
    bodies = '{"seconds": 3600}', '{"seconds": 0}'
    slow, quick = call_in_one_connection(config, actions["slow_one"], *bodies, timeouts=(0.5, 250))
    assert isinstance(slow, RequestFailed) and slow.service == "slow_one"
    assert "no reply within 0.5 s" in str(slow)
    assert quick.text == "late"


def test_real_server_that_dies_is_started_again():
    config = McpConfig(command=COMMAND, timeout=250, patience=0.1, tools=["die", "process"])
    die, process = mcp_tools.mcp_actions(config, 0)

    async def ask():
        before = await process.call({})
        with pytest.raises(RequestFailed) as failure:
            await die.call({})
        after = await process.call({})
        await process.close()
        return before.text, after.text, failure.value

    before, after, failure = asyncio.run(ask())
    assert before != after and failure.service == "die"
