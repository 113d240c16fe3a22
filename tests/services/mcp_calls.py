"""Calls of MCP actions, for tests with a server in this process and with real ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace


def call_in_one_connection(config, action, *bodies, timeouts=None):
    """Return what each body brings, a reply or an exception, over one connection with `config`.

    Args:
        config: Of the server.
        action: A tool.
        bodies: The bodies of the calls.
        timeouts: Seconds that each call may take, where they differ from those of the connection.
    """

    async def call_all():
        outcomes = []
        for number, body in enumerate(bodies):
            if timeouts:
                connection = await action._server._connected()
                connection._config = replace(config, timeout=timeouts[number])
            outcomes += await asyncio.gather(action.call(action.parse(body)), return_exceptions=True)
        await action.close()
        return outcomes

    action._server.config = config
    return asyncio.run(call_all())
