"""What an MCP server may send: half emojis, damaged lines, prints, floods, and tools that change."""

import asyncio
import gc
import gzip
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from http_rig import Handler, serving

from calibadv_jax.config import Config, LogConfig, McpConfig, RunConfig, ToolConfig
from calibadv_jax.contrib import mcp_tools
from calibadv_jax.core.errors import ActionRefused, EnvironmentFailure, RequestFailed, UserError, exit_status
from calibadv_jax.run.configured_actions import make_actions
from calibadv_jax.services import child_process, http_client

pytest.importorskip("mcp")
SERVER = Path(__file__).parent / "mcp_lines.py"
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
RESULT = '{"jsonrpc": "2.0", "id": $ID, "result": {"content": [{"type": "text", "text": "%s"}]}}'


def write_tools(folder, **schemas):
    tools = [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]
    (folder / "tools.json").write_text(json.dumps(tools))


@pytest.fixture
def config(tmp_path):
    write_tools(tmp_path, say=SCHEMA)
    command = shlex.join([sys.executable, "-S", str(SERVER), str(tmp_path)])
    return McpConfig(command=command, timeout=250, patience=20)


def results(action, *lines, timeout=None):
    """What calls at the same time bring: a text, or the error. `timeout`: of the calls, in seconds."""

    async def ask():
        if timeout is not None:
            connection = await action._server._connected()
            connection._config = replace(connection._config, timeout=timeout)
        calls = [action.call({"text": line}) for line in lines]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await action.close()
        return [getattr(outcome, "text", outcome) for outcome in outcomes]

    return asyncio.run(ask())


HEAD = '{"jsonrpc": "2.0", "id": $ID'
UNREADABLE = [
    RESULT[:-2] % "cut",
    '{"id": $ID, "result": {"content": []}}',
    f'{HEAD}, "result": {{"content": 3}}}}',
    f'{HEAD}, "result": {{"content": [{{"type": "text"}}]}}}}',
]


def test_unreadable_reply_fails_its_call_alone(config, monkeypatch):
    monkeypatch.setattr(http_client, "BAD_REPLIES", 1)
    (action,) = mcp_tools.mcp_actions(config, 0)
    *failed, good = results(action, *UNREADABLE, RESULT % "\\\\ud83d \\ud83d\\ud83d\\ude00", timeout=4)
    for failure in failed:
        assert type(failure) is RequestFailed and failure.service == "say" and str(failure).isprintable()
    assert good == "\\ud83d \ufffd\U0001f600"  # of half an emoji and a whole one


def test_print_to_standard_output_is_logged(config, tmp_path, capfd, caplog):
    log = tmp_path / "mcp.log"
    log.touch()
    (action,) = mcp_tools.mcp_actions(config, 0, log)
    assert results(action, *(f"loading {digit}\n{RESULT % digit}" for digit in "012")) == list("012")
    while len(lines := log.read_text().splitlines()) < 3:  # it is copied beside the calls
        time.sleep(0.01)
    assert sorted(lines) == [f"no message of MCP: loading {digit}" for digit in "012"]
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.mark.parametrize("is_lost", [True, False], ids=["new connection", "same connection"])
@pytest.mark.parametrize(
    ("tools", "change"),
    [({"other": SCHEMA}, "is gone"), ({"say": {**SCHEMA, "properties": {}}}, "has another schema")],
)
def test_changed_tool_ends_the_run(config, tmp_path, is_lost, tools, change):
    (action,) = mcp_tools.mcp_actions(config, 0)
    refusal = '{"jsonrpc": "2.0", "id": $ID, "error": {"code": -32602, "message": "no"}}'

    write_tools(tmp_path, new=SCHEMA, say=SCHEMA)  # another tool changes nothing

    async def ask():
        await action.call({"text": RESULT % "fine"})
        with pytest.raises(ActionRefused, match="no"):
            await action.call({"text": refusal})
        write_tools(tmp_path, **tools)
        try:
            await action.call({"text": "!" if is_lost else refusal})
        finally:
            await action.close()

    with pytest.raises(EnvironmentFailure) as failure:
        asyncio.run(ask())
    assert not isinstance(failure.value, RequestFailed)
    assert f"{config.command}: its tool 'say' {change}" in str(failure.value)
    assert exit_status(failure.value) == 75


def test_standard_error_is_kept_and_bounded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "LONGEST_LOG", 100_000)
    log = tmp_path / "run" / "mcp.log"
    (action,) = mcp_tools.mcp_actions(config, 0, log)
    assert results(action, "5") == ["ok"]
    while not log.is_file():  # it is copied beside the calls
        time.sleep(0.01)
    assert log.read_text() == "eeeee"
    assert results(action, *["1000000"] * 3) == ["ok"] * 3
    files = sorted(log.parent.iterdir())
    assert [file.name for file in files] == ["mcp.log", "mcp.log.old"]
    assert all(file.stat().st_size <= 100_000 + 2**16 for file in files)


def test_silent_program_is_waited_for_once(tmp_path, caplog):
    starts = tmp_path / "starts"
    command = shlex.join(["sh", "-c", f"echo start >> {starts}; while read -r line; do :; done"])
    config = Config(
        run=RunConfig(dir=str(tmp_path)),
        log=LogConfig(progress=False),
        tools=[ToolConfig(mcp=McpConfig(command=command, timeout=0.3, patience=0.1))],
    )
    for _ in range(3):
        with pytest.raises(UserError, match="no session within 0.3 s"):
            make_actions(config)
    gc.collect()
    assert starts.read_text() == "start\n" and not caplog.records


ABOUT = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "web", "version": "1"}}
ANSWERS = {
    "initialize": {"capabilities": {"tools": {}}} | ABOUT,
    "tools/list": {"tools": [{"name": "say", "inputSchema": SCHEMA}]},
}


class OverHttp(Handler):
    """Answers a call with `content`: as JSON, compressed, or as an event."""

    kind, content, openings = "", b"", 0

    def do_POST(self):
        request = json.loads(self.body())
        if request["method"] == "tools/call":
            text = self.content.replace(b"$ID", str(request["id"]).encode())
            encoding = {"Content-Encoding": "gzip"} if self.kind == "gzip" else {}
            sent = {"json": text, "gzip": gzip.compress(text, 1), "event-stream": b"data: " + text + b"\n\n"}
            media = "text/event-stream" if self.kind == "event-stream" else "application/json"
            self.reply(200, sent[self.kind], {"Content-Type": media} | encoding)
        elif result := ANSWERS.get(request["method"]):
            type(self).openings += request["method"] == "initialize"
            self.reply(200, {"jsonrpc": "2.0", "id": request["id"], "result": result})
        else:
            self.reply(404 if "id" in request else 202, b"")

    def do_GET(self):
        self.reply(405, b"")


@pytest.mark.parametrize("kind", ["json", "gzip", "event-stream"])
def test_bad_reply_over_http_fails_its_call_alone(monkeypatch, kind):
    monkeypatch.setattr(http_client, "BAD_REPLIES", 1)
    half, fine = ((RESULT % word).encode() for word in ("a \\ud83d", "fine"))
    Server = type("Server", (OverHttp,), {"kind": kind})

    async def ask(action):
        outcomes = []
        for Server.content in (half, b" " * (2**26 + 1), fine):
            outcomes += await asyncio.gather(action.call({"text": "x"}), return_exceptions=True)
        await action.close()
        return outcomes

    with serving(Server) as url:
        (action,) = mcp_tools.mcp_actions(McpConfig(url=f"{url}/mcp", timeout=250, patience=20), 0)
        emoji, long, good = asyncio.run(ask(action))
    assert type(long) is RequestFailed and good.text == "fine"
    assert Server.openings == 2  # one for the tools, and one for the calls
    if kind == "event-stream":  # the package reads it
        assert type(emoji) is RequestFailed
    else:
        assert emoji.text == "a \ufffd" and "the reply is longer than 64 MiB" in str(long)


def test_program_that_ended_is_started_again(config, tmp_path):
    """The call that ended it fails its trajectory; the next one has another process."""
    starts = tmp_path / "starts"
    command = shlex.join(["sh", "-c", f"echo start >> {starts}; exec {config.command}"])
    (action,) = mcp_tools.mcp_actions(replace(config, command=command, patience=0.01), 0)

    async def ask():
        before = await action.call({"text": RESULT % "before"})
        with pytest.raises(RequestFailed) as failure:
            await action.call({"text": "!"})
        counted = len(starts.read_text().splitlines())
        after = await action.call({"text": RESULT % "after"})
        await action.close()
        return before.text, failure.value.service, after.text, counted

    before, service, after, counted = asyncio.run(ask())
    assert (before, service, after) == ("before", "say", "after")
    assert len(starts.read_text().splitlines()) > counted >= 2  # one for the tools, one for the calls


def test_url_where_no_server_listens_is_named():
    config = Config(tools=[ToolConfig(mcp=McpConfig(url="http://127.0.0.1:9/mcp", patience=0.01))])
    with pytest.raises(UserError, match=r"MCP server http://127.0.0.1:9/mcp: .*correct tools\[\].mcp.url"):
        make_actions(config)
