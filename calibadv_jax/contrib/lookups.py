"""Many questions looked up beside each other, outside of any rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TypeVar

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import QueryRefused
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services.retriever_client import RetrieverClient

AT_ONCE = 128  # items; the client puts their queries into common requests

Item = TypeVar("Item")
Result = TypeVar("Result")
Search = Callable[[str], Awaitable[list[Document]]]


def look_up_each(
    config: RetrieverConfig,
    url: str | Sequence[str],
    items: Sequence[Item],
    work: Callable[[Item, Search], Awaitable[Result]],
    show: Callable[[int], object] = lambda done: None,
) -> list[Result]:
    """Return what `work` makes of each item and a search, which finds nothing for a refused query."""

    async def all_of_them() -> list[Result]:
        client, slots, numbers = RetrieverClient(config, url), asyncio.Semaphore(AT_ONCE), count(1)

        async def search(query: str) -> list[Document]:
            with suppress(QueryRefused):
                return (await client.search([query]))[0]
            return []

        async def finish(item: Item) -> Result:
            async with slots:
                result = await work(item, search)
            show(next(numbers))
            return result

        try:
            return list(await asyncio.gather(*map(finish, items)))
        finally:
            await client.close()

    return asyncio.run(all_of_them())
