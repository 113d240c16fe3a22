"""An MCP server of tests that writes the lines it is told to: ``mcp_lines.py FOLDER``.

FOLDER/tools.json holds its tools. The argument `text` of a call is the line of its reply, in which $ID stands
for the call's id; an exclamation mark before it ends the server, and a number is that many bytes of errors.
"""

import json
import os
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])


def write(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def reply(identity, result):
    write(json.dumps({"jsonrpc": "2.0", "id": identity, "result": result}))


for line in sys.stdin:
    request = json.loads(line)
    identity, method = request.get("id"), request["method"]
    tools = json.loads((FOLDER / "tools.json").read_text())
    if method == "initialize":
        version = request["params"]["protocolVersion"]
        about = {"name": "lines", "version": "1"}
        reply(identity, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
    elif method == "tools/list":
        reply(identity, {"tools": tools})
    elif method == "tools/call":
        text = request["params"]["arguments"]["text"]
        if text.startswith("!"):
            os._exit(3)
        if all(tool["name"] != request["params"]["name"] for tool in tools):
            reply(identity, {"content": [{"type": "text", "text": "unknown tool"}], "isError": True})
        elif text.isdecimal():
            sys.stderr.write("e" * int(text))
            sys.stderr.flush()
            reply(identity, {"content": [{"type": "text", "text": "ok"}]})
        else:
            write(text.replace("$ID", str(identity)))
    elif identity is not None:
        error = {"code": -32601, "message": "no such method"}
        write(json.dumps({"jsonrpc": "2.0", "id": identity, "error": error}))
