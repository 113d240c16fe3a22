"""A redirection is a reply like any other: a request, and its token, stay with the address that was given."""

import asyncio

import pytest
from aiohttp import web

from calibadv_jax.core.errors import UserError
from calibadv_jax.services.http_client import open_session, post


async def work(status):
    """What the client got, and the requests that reached the place it was sent on to."""
    reached = []

    async def there(request):
        reached.append(dict(request.headers))
        return web.json_response({"result": []})

    async def here(request):
        raise {301: web.HTTPMovedPermanently, 302: web.HTTPFound, 307: web.HTTPTemporaryRedirect}[status](
            "/there"
        )

    app = web.Application()
    app.router.add_post("/here", here)
    app.router.add_route("*", "/there", there)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = open_session(5.0, "secret")
    try:
        return await post(http, f"http://127.0.0.1:{runner.addresses[0][1]}/here", json={}), reached
    finally:
        await http.close()
        await runner.cleanup()


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirection_is_not_followed(status):
    reply, reached = asyncio.run(asyncio.wait_for(work(status), 30))
    assert reply.status == status and reached == []


def test_what_is_no_url_is_named():
    async def ask():
        async with open_session(1.0) as http:
            await post(http, "not a url", json={})

    with pytest.raises(UserError, match="not a url: not a URL; give one such as"):
        asyncio.run(ask())
