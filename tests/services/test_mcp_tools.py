"""Tools of a real MCP server as actions: on its pipes and over HTTP, and what a bad server cannot do."""

import asyncio
import contextlib
import inspect
import json
import re
import shlex
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from calibadv_jax.config import Config, McpConfig, ToolConfig
from calibadv_jax.contrib import mcp_tools
from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.run.actions import make_actions
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import LONGEST_REPLY

pytest.importorskip("mcp")
import mcp
from mcp_server import server as served

SERVER = str(Path(__file__).parent / "mcp_server.py")
COMMAND = shlex.join([sys.executable, SERVER])
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("pipes", "http")]


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


@pytest.fixture(scope="module", params=["in process", *SLOW])
def server(request):
    """A config of the server, and its actions by name."""
    here, client = McpConfig(command="in process", timeout=20), mcp_tools._client

    def opened(config, log):
        is_here = config.command == "in process"
        return mcp.Client(served, cache=None) if is_here else client(config, log)

    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(mcp_tools, "_client", opened)
        if request.param == "pipes":
            here = McpConfig(command=COMMAND, timeout=20)
        elif request.param == "http":
            here = McpConfig(url=stack.enter_context(over_http()), timeout=20)
        yield here, {action.name: action for action in mcp_tools.mcp_actions(here, 0)}


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


def test_servers_tools_are_actions(server):
    config, actions = server
    assert set(actions) >= {"weather", "add", "slow_one"}  # a tag has no hyphen
    assert actions["weather"].argument == "city" and actions["large"].may_be_empty
    assert actions["add"].argument == '{"left": integer, "right": integer}'
    plain, as_json = asked(config, actions["weather"], "Rome", '{"city": "Oslo"}')
    assert (plain.text, as_json.text) == ("sunny in Rome", "sunny in Oslo")
    body = json.dumps({"left": 2, "right": 3})
    total, of_tool, of_schema, hostile = asked(
        config, actions["add"], body, '{"left": -1, "right": 3}', '{"left": "x"}', '{"left": "\\ud800"}'
    )
    assert total.text == "5"
    # The policy reads why, and goes on; nothing of it ends the connection.
    assert isinstance(of_tool, ActionRefused) and "add" in str(of_tool)
    assert isinstance(of_schema, ActionRefused) and isinstance(hostile, ActionRefused)
    (large,) = asked(config, actions["large"], "")
    assert len(large.text) > 10_000_000
    (book,) = asked(config, actions["book"], "")
    (document,) = book.documents
    assert (document.id, document.text) == ("shelf://book", "<search> a page </search>")


def test_slow_tool_fails_its_trajectory_only(server, monkeypatch):
    config, actions = server
    monkeypatch.setattr(http_client, "BAD_REPLIES", 1)
    limit = 0.5 if config.command == "in process" else 3
    timed = replace(config, timeout=limit, patience=1)
    slow, quick = asked(timed, actions["slow_one"], '{"seconds": 60}', '{"seconds": 0}')
    assert isinstance(slow, RequestFailed) and slow.service == "slow_one"
    assert f"no reply within {limit:g} s" in str(slow)
    assert quick.text == "late"


def test_what_cannot_be_started_is_said():
    def made(**mcp):
        return make_actions(Config(tools=[ToolConfig(mcp=McpConfig(**mcp))]))

    with pytest.raises(UserError, match=r"'/nowhere/server' cannot be started .*\[\].mcp.command"):
        made(command="/nowhere/server")
    url = f"http://127.0.0.1:{free_port()}/mcp"
    with pytest.raises(UserError, match=rf"MCP server {re.escape(url)}: .*correct tools\[\].mcp.url"):
        made(url=url, patience=0.01)


def test_package_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'calibadv-jax\[mcp\]'"):
        mcp_tools.mcp_actions(McpConfig(command="python"), 0)


def tool(name="look up", properties=None, required=(), description="Finds  a\nword."):
    properties = {"word": {"type": "string"}} if properties is None else properties
    schema = {"properties": properties, "required": list(required)}
    return SimpleNamespace(name=name, description=description, input_schema=schema)


def block(kind, **fields):
    return SimpleNamespace(type=kind, **fields)


def result(*blocks, structured=None, is_error=False):
    return SimpleNamespace(content=list(blocks), structured_content=structured, is_error=is_error)


class FakeServer:
    """Takes its replies from a list, and notes its connections and calls; an exception is raised.

    `opens`: what happens at each opening of a connection, an exception or None; then none fails.
    """

    def __init__(self):
        self.tools, self.replies, self.opens = [tool()], [], []
        self.calls, self.pages = [], []
        self.opened = self.closed = self.cancelled = 0

    @asynccontextmanager
    async def client(self, config, log):
        failure = self.opens.pop(0) if self.opens else None
        if failure is not None:
            log.write("starting\nno module here\n\n")
            raise failure
        self.opened += 1
        try:
            yield self
        except asyncio.CancelledError:
            self.cancelled += 1  # the event loop has ended before the connection
            raise
        finally:
            self.closed += 1

    async def list_tools(self, cursor):
        """A tool a page."""
        at = int(cursor or 0)
        self.pages.append(at)
        assert len(self.pages) < 50, "the same page again and again"
        more = str(at + 1) if at + 1 < len(self.tools) else None
        return SimpleNamespace(tools=self.tools[at : at + 1], next_cursor=more)

    async def call_tool(self, name, arguments):
        self.calls.append((name, arguments))
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply


@pytest.fixture
def fake(monkeypatch):
    fake = FakeServer()
    monkeypatch.setattr(mcp_tools, "_client", fake.client)
    yield fake
    assert fake.closed == fake.opened and not fake.cancelled


def mcp_error(code, message="it broke"):
    return mcp.MCPError(code, message)


def fake_actions(**config):
    return mcp_tools.mcp_actions(McpConfig(command="fake", **{"timeout": 5, "patience": 0.05} | config), 7)


def test_tools_come_from_all_pages_in_order(fake):
    fake.tools = [tool(name) for name in ("one", "two", "three")]
    assert [action.name for action in fake_actions()] == ["one", "two", "three"]
    assert [action.name for action in fake_actions(tools=["three", "one"])] == ["three", "one"]
    assert fake.opened == 2
    with pytest.raises(UserError, match="MCP server fake has no tool 'four'; it has one, two, three"):
        fake_actions(tools=["one", "four"])
    fake.tools = []
    with pytest.raises(UserError, match="it has none"):
        fake_actions(tools=["one"])


def test_tool_is_described_by_its_schema(fake):
    number = {"type": "integer"}
    fake.tools = [
        tool(required=["word"]),
        tool("größe-2", {"left": number, "right": {"anyOf": []}}, ["left"], ""),
        tool("bare", {}, ["gone"], "x" * 400),
        tool("number", {"left": number}),
    ]
    words, two, bare, of_number = fake_actions()
    assert (words.name, words.purpose) == ("look_up", "use look_up (Finds a word)")
    assert (words.argument, words.may_be_empty, words.max_length) == ("word", False, 7)
    assert (two.name, two.purpose) == ("gr__e_2", "use gr__e_2")
    assert two.argument == '{"left": integer, "right": value}' and not two.may_be_empty
    assert (bare.argument, bare.may_be_empty) == ("{}", True)
    assert bare.purpose == f"use bare ({'x' * 300})"
    assert (of_number.argument, of_number.may_be_empty) == ('{"left": integer}', True)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("Rome", {"word": "Rome"}),
        ('{"word": "Oslo"}', {"word": "Oslo"}),
        ('["Oslo"]', {"word": '["Oslo"]'}),
        ("12", {"word": "12"}),
        ("\ud800", {"word": "\ufffd"}),
        ('{"\\ud800": ["\\udfff", {"a": "\\ud800"}]}', {"\ufffd": ["\ufffd", {"a": "\ufffd"}]}),
        ("[" * 100, {"word": "[" * 100}),
        ("[" * 60 + "{" * 41, None),
    ],
)
def test_body_of_a_tool_with_one_text(fake, body, arguments):
    (action,) = fake_actions()
    if arguments is not None:
        assert action.parse(body) == arguments
        return
    with pytest.raises(ValueError, match="too many brackets"):
        action.parse(body)


def test_body_of_other_tools_is_an_object(fake):
    fake.tools = [tool(properties={"left": {"type": "integer"}, "text": {"type": "string"}})]
    (action,) = fake_actions()
    assert action.parse('{"left": 1}') == {"left": 1}
    for body in ("1", '"left"', "left", "[1]"):
        with pytest.raises(ValueError, match=r'write a JSON object: \{"left": integer, "text": string\}'):
            action.parse(body)


def test_reply_has_texts_documents_and_names(fake):
    page = SimpleNamespace(uri="shelf://page", text="a page")
    picture = SimpleNamespace(uri="shelf://picture", blob="x")
    blocks = (
        block("text", text="first"),
        block("resource", resource=page),
        block("resource", resource=picture),
        block("resource_link", name="more", uri="shelf://more"),
        block("image"),
    )
    fake.replies = [
        result(*blocks, structured={"not": "shown"}),
        result(structured={"found": "Ü"}),
        result(),
        result(block("text", text="no"), block("text", text="such"), is_error=True),
    ]
    (action,) = fake_actions()
    whole, structured, empty, refused = asked(action._server.config, action, "a", "b", "c", "d")
    assert whole.text == "first\n[resource]\nmore: shelf://more\n[image]"
    (document,) = whole.documents
    assert (document.id, document.title, document.text) == ("shelf://page", "shelf://page", "a page")
    assert (structured.text, structured.documents) == ('{"found": "Ü"}', ())
    assert (empty.text, empty.documents) == ("", ())
    assert type(refused) is ActionRefused and str(refused) == "no\nsuch"
    assert fake.calls == [("look up", {"word": word}) for word in "abcd"]
    assert fake.opened == 2  # one connection for the tools, one for the calls


def test_errors_of_a_server_are_borne_three_times(fake):
    broken = [mcp_error(-32603, "it\nbroke " + "x" * 300) for _ in range(http_client.BAD_REPLIES)]
    fake.replies = [*broken[1:], result(block("text", text="a")), *broken]
    (action,) = fake_actions()
    good, failed = asked(action._server.config, action, "a", "b")
    assert good.text == "a" and len(fake.calls) == 6 and fake.opened == 2
    assert type(failed) is RequestFailed and failed.service == "look_up"
    assert str(failed).startswith("MCP server fake: error -32603: it broke xxx") and len(str(failed)) < 250


@pytest.mark.parametrize(
    ("error", "texts", "opened"),
    [
        (mcp_error(mcp_tools.CONNECTION_CLOSED), ["a", "b"], 3),  # one for the tools, two for the calls
        (mcp_error(-32001, mcp_tools.SESSION_ENDED), ["a", "b"], 3),
        (OSError("pipe gone"), ["a", "b"], 3),
        (mcp_error(mcp_tools.INVALID_PARAMS, "no number"), ["no number", "a"], 2),  # not sent again
    ],
    ids=repr,
)
def test_lost_connection_is_made_again(fake, error, texts, opened):
    fake.replies = [error, result(block("text", text="a")), result(block("text", text="b"))]
    (action,) = fake_actions(patience=20)
    outcomes = asked(action._server.config, action, "a", "b")
    assert [getattr(outcome, "text", str(outcome)) for outcome in outcomes] == texts
    assert (type(outcomes[0]) is ActionRefused) == (opened == 2) and fake.opened == opened


def test_server_that_stays_away_fails_the_trajectory(fake):
    (action,) = fake_actions()
    fake.opens = [ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("no\nluck")])])] * 10_000
    (failed,) = asked(action._server.config, action, "a")
    assert type(failed) is RequestFailed
    assert str(failed) == "MCP server fake: ValueError: no luck (no module here)"
    assert 2 <= 10_000 - len(fake.opens) < 1_000 and not fake.calls


def test_server_away_at_the_start_is_waited_for(fake, monkeypatch):
    def over_url(patience):
        return mcp_tools.mcp_actions(McpConfig(url="http://h/mcp", timeout=5, patience=patience), 0)

    fake.opens = [OSError("gone")] * 2
    assert [action.name for action in over_url(20)] == ["look_up"] and not fake.opens
    fake.opens = [OSError("gone")] * 10_000
    with pytest.raises(UserError, match=r"OSError: gone .*\(no module here\); correct tools\[\].mcp.command"):
        fake_actions()
    with pytest.raises(UserError, match=r"server http://h/mcp: OSError: gone .*; start it, or correct tools"):
        over_url(0.01)
    fake.opens, patience = [], []
    once = mcp_tools.retry
    monkeypatch.setattr(mcp_tools, "retry", lambda attempt, limit: patience.append(limit) or once(attempt, 0))
    for seconds in (5, 500):
        over_url(seconds)
    assert patience == [5, mcp_tools.START_PATIENCE]


def test_calls_at_once_share_one_connection(fake):
    (action,) = fake_actions()
    opened = fake.opened

    async def calls():
        replies = await asyncio.gather(*(action.call({"word": str(number)}) for number in range(5)))
        await action.close()
        return [reply.text for reply in replies]

    for number in (1, 2):  # a connection belongs to its event loop
        fake.replies = [result(block("text", text=str(n))) for n in range(5)]
        assert asyncio.run(calls()) == list("01234")
        assert fake.opened == opened + number


def test_session_that_does_not_open_is_left(fake, monkeypatch):
    (action,) = fake_actions()

    @asynccontextmanager
    async def never(config, log):
        await asyncio.sleep(60)
        yield None

    monkeypatch.setattr(mcp_tools, "_client", never)
    monkeypatch.setattr(mcp_tools, "CLOSING", 0.01)
    (failed,) = asked(replace(action._server.config, timeout=0.05), action, "a")
    assert type(failed) is RequestFailed and "no session within 0.05 s" in str(failed)


def test_command_and_token_reach_the_package(monkeypatch):
    made, log = [], object()

    def note(kind):
        return lambda *arguments, **options: made.append((kind, arguments, options))

    monkeypatch.setattr("mcp.Client", note("client"))
    monkeypatch.setattr("mcp.client.stdio.stdio_client", note("pipes"))
    http, note_http = SimpleNamespace(), note("http")
    monkeypatch.setattr(
        "mcp.client.streamable_http.create_mcp_http_client",
        lambda **options: note_http(**options) or http,
    )
    monkeypatch.setenv("MCP_TEST_VARIABLE", "7")
    mcp_tools._client(McpConfig(command="python 'my server.py' --fast"), log)
    (kind, (started,), options), client = made
    assert (kind, started.command, started.args) == ("pipes", "python", ["my server.py", "--fast"])
    assert started.env["MCP_TEST_VARIABLE"] == "7" and options == {"errlog": log}
    assert client[2] == {"cache": None}
    newer, older = note("stream"), note("older stream")
    newer.__signature__ = inspect.Signature(
        [inspect.Parameter("max_sse_event_size", inspect.Parameter.KEYWORD_ONLY)]
    )
    for stream, token, headers, limit in (
        (newer, " secret\n", {"Authorization": "Bearer secret"}, {"max_sse_event_size": LONGEST_REPLY}),
        (older, "", None, {}),
    ):
        made.clear()
        monkeypatch.setattr("mcp.client.streamable_http.streamable_http_client", stream)
        monkeypatch.setenv(mcp_tools.TOKEN_VARIABLE, token)
        mcp_tools._client(McpConfig(url="http://h/mcp"), log)
        assert made[0] == ("http", (), {"headers": headers})
        assert made[1][1:] == (("http://h/mcp",), {"http_client": http} | limit)
