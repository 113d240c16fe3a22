"""The trainer's client on an event loop of its own."""

import asyncio
from contextlib import contextmanager

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.services.retriever_client import RetrieverClient


@contextmanager
def client_of(*services, warn=print, **config):
    """A client of these URLs, or objects with a url, and a function that runs coroutines on its loop."""
    config = RetrieverConfig(**{"timeout": 5.0, "patience": 20.0} | config)
    client = RetrieverClient(config, [getattr(service, "url", service) for service in services], warn)
    with asyncio.Runner() as runner:
        try:
            yield client, runner.run
        finally:
            runner.run(client.close())


def search(url, queries, **config):
    """Documents of each query."""
    with client_of(url, **{"timeout": 20.0} | config) as (client, run):
        return run(client.search(queries))
