"""One search by the trainer's client."""

import asyncio

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.services.retriever_client import RetrieverClient


def search(url, queries, **config):
    """The documents of each query."""
    client = RetrieverClient(RetrieverConfig(**({"timeout": 2.0, "patience": 5.0} | config)), url)

    async def run():
        try:
            return await client.search(queries)
        finally:
            await client.close()

    return asyncio.run(run())
