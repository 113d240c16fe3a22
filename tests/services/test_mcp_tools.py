"""Tools of an MCP server as actions, and what a bad server cannot do; its transports: test_mcp_streams."""

import asyncio
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mcp_calls import call_in_one_connection

from calibadv_jax.config import Config, McpConfig, ToolConfig
from calibadv_jax.contrib import mcp_tools
from calibadv_jax.core.errors import ActionRefused, RequestFailed, UserError
from calibadv_jax.core.tool_calls import check_schema
from calibadv_jax.core.trajectory import Document
from calibadv_jax.run.configured_actions import make_actions
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import LONGEST_REPLY

pytest.importorskip("mcp")
import mcp
from mcp_server import server as served


@pytest.fixture
def server(monkeypatch):
    """A server of the package in this process: its config, and its actions by name."""
    config = McpConfig(command="in process", timeout=250)
    monkeypatch.setattr(mcp_tools, "_client", lambda *_: mcp.Client(served, cache=None))
    return config, {action.name: action for action in mcp_tools.mcp_actions(config, 0)}


def test_servers_tools_are_actions(server):
    config, actions = server
    assert set(actions) >= {"weather", "add", "slow_one"}  # a tag has no hyphen
    assert actions["weather"].argument == "city" and actions["large"].may_be_empty
    assert actions["add"].argument == '{"left": integer, "right": integer}'
    schema = actions["add"].schema()
    assert schema.parameters["required"] == ["left", "right"]
    assert {name: part["type"] for name, part in schema.parameters["properties"].items()} == {
        "left": "integer",
        "right": "integer",
    }
    check_schema(schema, "tools")
    assert actions["add"].parse_arguments({"left": 2, "right": 3}) == {"left": 2, "right": 3}
    plain, as_json = call_in_one_connection(config, actions["weather"], "Rome", '{"city": "Oslo"}')
    assert (plain.text, as_json.text) == ("sunny in Rome", "sunny in Oslo")
    bodies = ('{"left": 2, "right": 3}', '{"left": -1, "right": 3}', '{"left": "x"}', '{"left": "\\ud800"}')
    total, *refused = call_in_one_connection(config, actions["add"], *bodies)
    # The policy reads why, and goes on; nothing of it ends the connection.
    assert total.text == "5" and {type(error) for error in refused} == {ActionRefused}
    assert "add" in str(refused[0])
    (large,) = call_in_one_connection(config, actions["large"], "")
    assert len(large.text) > 10_000_000
    (book,) = call_in_one_connection(config, actions["book"], "")
    (document,) = book.documents
    assert (document.id, document.text) == ("shelf://book", "<search> a page </search>")


def test_slow_tool_fails_its_trajectory_only(server, monkeypatch):
    config, actions = server
    monkeypatch.setattr(http_client, "BAD_REPLIES", 1)
    bodies = '{"seconds": 3600}', '{"seconds": 0}'
    slow, quick = call_in_one_connection(config, actions["slow_one"], *bodies, timeouts=(0.5, 250))
    assert isinstance(slow, RequestFailed) and slow.service == "slow_one"
    assert "no reply within 0.5 s" in str(slow) and quick.text == "late"


def test_missing_program_or_package_is_named(monkeypatch):
    tools = [ToolConfig(mcp=McpConfig(command="/nowhere/server"))]
    with pytest.raises(UserError, match=r"'/nowhere/server' cannot be started .*\[\].mcp.command"):
        make_actions(Config(tools=tools))
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'calibadv-jax\[mcp\]'"):
        mcp_tools.mcp_actions(McpConfig(command="python"), 0)


def tool(name="look up", properties=None, required=(), description="Finds  a\nword."):
    properties = {"word": {"type": "string"}} if properties is None else properties
    schema = {"properties": properties, "required": list(required)}
    return SimpleNamespace(name=name, description=description, input_schema=schema)


def text(content):
    return SimpleNamespace(type="text", text=content)


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
            log.stream.write(b"starting\nno module here\n\n")
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
        number = int(cursor or 0)
        self.pages.append(number)
        assert len(self.pages) < 50, "the same page again and again"
        more = str(number + 1) if number + 1 < len(self.tools) else None
        return SimpleNamespace(tools=self.tools[number : number + 1], next_cursor=more)

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


def fake_actions(**config):
    config = McpConfig(**{"command": "fake", "timeout": 5, "patience": 0.05} | config)
    return mcp_tools.mcp_actions(config, 7)


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
    actions = fake_actions()
    assert [(action.name, action.purpose, action.argument, action.may_be_empty) for action in actions] == [
        ("look_up", "use look_up (Finds a word)", "word", False),
        ("gr__e_2", "use gr__e_2", '{"left": integer, "right": value}', False),
        ("bare", f"use bare ({'x' * 300})", "{}", True),
        ("number", "use number (Finds a word)", '{"left": integer}', True),
    ]
    assert {action.max_length for action in actions} == {7}


ONLY_OBJECTS = r'write a JSON object: \{"left": integer, "text": string\}'


@pytest.mark.parametrize(
    ("body", "of_text", "of_two"),
    [  # a body, the arguments of a tool with one text, and of another; or why there are none
        ("", {}, {}),
        ("Rome", {"word": "Rome"}, ONLY_OBJECTS),
        ('{"word": "Oslo"}', {"word": "Oslo"}, {"word": "Oslo"}),
        ('["Oslo"]', {"word": '["Oslo"]'}, ONLY_OBJECTS),
        ("12", {"word": "12"}, ONLY_OBJECTS),
        ("\ud800", {"word": "\ufffd"}, ONLY_OBJECTS),
        ('{"\\ud800": [{"a": "\\udfff"}]}', {"\ufffd": [{"a": "\ufffd"}]}, {"\ufffd": [{"a": "\ufffd"}]}),
        ("[" * 100, {"word": "[" * 100}, ONLY_OBJECTS),
        ("[" * 60 + "{" * 41, "too many brackets", "too many brackets"),
    ],
)
def test_body_is_an_object_or_the_only_text(fake, body, of_text, of_two):
    fake.tools = [tool(), tool("other", {"left": {"type": "integer"}, "text": {"type": "string"}})]
    for action, expected in zip(fake_actions(), (of_text, of_two), strict=True):
        if isinstance(expected, dict):
            assert action.parse(body) == expected
        else:
            with pytest.raises(ValueError, match=expected):
                action.parse(body)


def test_reply_has_texts_documents_and_names(fake):
    page, picture = SimpleNamespace(uri="shelf://page", text="a page"), SimpleNamespace(uri="p", blob="x")
    blocks = (
        text("first"),
        *(SimpleNamespace(type="resource", resource=resource) for resource in (page, picture)),
        SimpleNamespace(type="resource_link", name="more", uri="shelf://more"),
        SimpleNamespace(type="image"),
    )
    fake.replies = [
        result(*blocks, structured={"data": 7}),
        result(structured={"found": "Ü"}),
        result(),
        result(text("no"), text("such"), is_error=True),
    ]
    (action,) = fake_actions()
    whole, structured, empty, refused = call_in_one_connection(
        action._server.config, action, "a", "b", "c", "d"
    )
    assert whole.text == 'first\n[resource]\nmore: shelf://more\n[image]\n{"data": 7}'
    assert whole.documents == (Document(page.uri, page.uri, "a page"),)
    assert (structured.text, empty.text, structured.documents) == ('{"found": "Ü"}', "", ())
    assert type(refused) is ActionRefused and str(refused) == "no\nsuch"
    assert fake.calls == [("look up", {"word": word}) for word in "abcd"]
    assert fake.opened == 2  # one connection for the tools, one for the calls


@pytest.mark.parametrize(
    ("texts", "structured", "expected"),
    [
        (["2 notes."], {"notes": ["a", "b"]}, '2 notes.\n{"notes": ["a", "b"]}'),  # a summary
        ([""], {"notes": []}, '\n{"notes": []}'),
        (['{"notes": ["a"]}'], {"notes": ["a"]}, '{"notes": ["a"]}'),  # as the specification advises
        (["sunny"], {"result": "sunny"}, "sunny"),  # a value that a server wraps
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
        (['{"n": 1}', '{"n": 2}'], {"result": [{"n": 1}, {"n": 2}]}, '{"n": 1}\n{"n": 2}'),
        (["5"], {"result": 5}, "5"),
        (["1 of 12"], {"number": 12}, '1 of 12\n{"number": 12}'),
    ],
)
def test_structured_content_is_shown_once(fake, texts, structured, expected):
    fake.replies = [result(*map(text, texts), structured=structured)]
    (action,) = fake_actions()
    (reply,) = call_in_one_connection(action._server.config, action, "a")
    assert reply.text == expected


def test_errors_of_a_server_are_borne_three_times(fake):
    broken = [mcp.MCPError(-32603, "it\nbroke " + "x" * 300) for _ in range(http_client.BAD_REPLIES)]
    fake.replies = [*broken[1:], result(text("a")), *broken]
    (action,) = fake_actions()
    good, failed = call_in_one_connection(action._server.config, action, "a", "b")
    assert good.text == "a" and len(fake.calls) == 6 and fake.opened == 2
    assert type(failed) is RequestFailed and failed.service == "look_up"
    assert str(failed).startswith("MCP server fake: error -32603: it broke xxx") and len(str(failed)) < 250


@pytest.mark.parametrize(
    ("error", "texts", "opened"),
    [
        (mcp.MCPError(mcp_tools.CONNECTION_CLOSED, "it broke"), ["a", "b"], 3),  # one was for the tools
        (mcp.MCPError(-32001, mcp_tools.SESSION_ENDED), ["a", "b"], 3),
        (OSError("pipe gone"), ["a", "b"], 3),
        (mcp.MCPError(mcp_tools.INVALID_PARAMS, "no number"), ["no number", "a"], 2),  # not sent again
    ],
    ids=repr,
)
def test_lost_connection_is_made_again(fake, error, texts, opened):
    fake.replies = [error, result(text("a")), result(text("b"))]
    (action,) = fake_actions(patience=20)
    outcomes = call_in_one_connection(action._server.config, action, "a", "b")
    assert [getattr(outcome, "text", str(outcome)) for outcome in outcomes] == texts
    assert (type(outcomes[0]) is ActionRefused) == (opened == 2) and fake.opened == opened


def test_server_that_stays_away_fails_the_trajectory(fake):
    (action,) = fake_actions()
    fake.opens = [ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("no\nluck")])])] * 10_000
    (failed,) = call_in_one_connection(action._server.config, action, "a")
    assert type(failed) is RequestFailed
    assert str(failed) == "MCP server fake: ValueError: no luck (no module here)"
    assert 2 <= 10_000 - len(fake.opens) < 1_000 and not fake.calls


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({}, r"fake: OSError: gone .*\(no module here\); correct tools\[\].mcp.command"),
        (
            {"command": "", "url": "http://h/mcp"},
            r"http://h/mcp: OSError: gone .*; start it, or correct tools\[\].mcp.url",
        ),
    ],
)
def test_server_away_at_the_start_is_waited_for(fake, monkeypatch, where, message):
    """A program that ends is not, and no server for longer than START_PATIENCE."""
    patience, retry = [], mcp_tools.retry
    fake.opens = [OSError("gone")] * 10_000
    with pytest.raises(UserError, match=message):
        fake_actions(**where)
    assert len(fake.opens) < 9_999 if where else len(fake.opens) == 9_999
    fake.opens = [OSError("gone")] * 2 if where else []
    assert [action.name for action in fake_actions(**where, patience=20)] == ["look_up"] and not fake.opens
    monkeypatch.setattr(mcp_tools, "retry", lambda once, limit: patience.append(limit) or retry(once, 0))
    fake_actions(**where, patience=500)
    assert patience == ([mcp_tools.START_PATIENCE] if where else [0])


def test_calls_at_once_share_one_connection(fake):
    (action,) = fake_actions()
    opened = fake.opened

    async def calls():
        replies = await asyncio.gather(*(action.call({"word": str(number)}) for number in range(5)))
        await action.close()
        return [reply.text for reply in replies]

    for number in (1, 2):  # a connection belongs to its event loop
        fake.replies = [result(text(str(n))) for n in range(5)]
        assert asyncio.run(calls()) == list("01234")
        assert fake.opened == opened + number


def test_command_and_token_reach_the_package(monkeypatch):
    client, pipes, http, log = Mock(), Mock(), Mock(), Mock()
    monkeypatch.setattr("mcp.Client", client)
    monkeypatch.setattr("mcp.client.stdio.stdio_client", pipes)
    monkeypatch.setattr("mcp.client.streamable_http.create_mcp_http_client", http)
    monkeypatch.setenv("MCP_TEST_VARIABLE", "7")
    mcp_tools._client(McpConfig(command="python 'my server.py' --fast"), log)
    (started,), options = pipes.call_args
    assert (started.command, started.args) == ("python", ["my server.py", "--fast"])
    assert started.env["MCP_TEST_VARIABLE"] == "7" and options == {"errlog": log.stream}
    assert client.call_args.kwargs == {"cache": None}
    for token, headers in ((" secret\n", {"Authorization": "Bearer secret"}), ("", None)):
        stream = Mock()
        monkeypatch.setattr("mcp.client.streamable_http.streamable_http_client", stream)
        monkeypatch.setenv(mcp_tools.TOKEN_VARIABLE, token)
        mcp_tools._client(McpConfig(url="http://h/mcp"), log)
        http.assert_called_with(headers=headers)
        limit = {"max_sse_event_size": LONGEST_REPLY}
        stream.assert_called_once_with("http://h/mcp", http_client=http.return_value, **limit)
