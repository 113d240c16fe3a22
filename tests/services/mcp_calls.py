"""Calls of MCP actions, for tests with a server in this process and with real ones."""

from __future__ import annotations

import asyncio


def call_in_one_connection(config, action, *bodies):
    """Return what each body brings, a reply or an exception, over one connection with `config`."""

    async def call_all():
        outcomes = []
        for body in bodies:
            outcomes += await asyncio.gather(action.call(action.parse(body)), return_exceptions=True)
        await action.close()
        return outcomes

    action._server.config = config
    return asyncio.run(call_all())
