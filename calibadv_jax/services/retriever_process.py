"""The retrieval service of a run: services that run already, or a child process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.core.errors import UserError
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.http_client import Warn
from calibadv_jax.services.retriever_client import RetrieverClient

# By option of the service, the config key that sets it.
KEY_OF = {
    "corpus_path": "retriever.corpus",
    "retriever_name": "retriever.encoder",
    "index_path": "retriever.index",
    "retrieval_topk": "retriever.topk",
    "threads": "retriever.threads",
    "retriever_model": "retriever.model",
    "pages_path": "retriever.pages",
    "reranker_model": "retriever.reranker",
}


class RetrieverProcess(ChildService):
    """The retrieval service as a child process.

    Args:
        config: The section `retriever`.
        log_path: File to which the output of the service is added.
    """

    def __init__(self, config: RetrieverConfig, log_path: Path):
        options = {
            "corpus_path": config.corpus,
            "retriever_name": config.encoder,
            "index_path": config.index or f"{config.corpus}.index",
            "retrieval_topk": config.topk,
            "threads": config.threads,
            "retriever_model": config.model,
            "pages_path": config.pages,
            "reranker_model": config.reranker,
        }
        command = [sys.executable, "-m", "retriever.serve", "--build_if_missing"]
        for name, value in options.items():
            if value != "":
                command += [f"--{name}", str(value)]
        super().__init__(
            name="the retriever",
            command=command,
            log_path=log_path,
            start_timeout=config.start_timeout,
            timeout_key="retriever.start_timeout",
            key_of=KEY_OF,
        )


def check_running(config: RetrieverConfig, warn: Warn) -> None:
    """Wait until a service of `retriever.url` answers.

    Args:
        config: The section `retriever`, with a URL.
        warn: Takes a line about the wait.

    Raises:
        UserError: The services serve different indexes, or rerank in another way than configured.
        EnvironmentFailure: No service answers within `retriever.patience`.
    """
    client = RetrieverClient(config, config.url, warn)
    client.check_reranker(client.health())


@contextmanager
def open_retriever(config: RetrieverConfig, log_path: Path, warn: Warn) -> Iterator[str | list[str]]:
    """Provide a retrieval service for the time of the block.

    Args:
        config: The section `retriever`.
        log_path: File to which the output of a child process is added.
        warn: Takes lines about waits, and about a child process that has ended and is started again.

    Yields:
        `retriever.url` if it is set, otherwise the URL of a child process that ends with the block.

    Raises:
        UserError: Neither a URL nor a corpus is configured; and the errors of `check_running`.
    """
    if config.url:
        if config.url != NO_RETRIEVER_URL:
            check_running(config, warn)
        yield config.url
        return
    if not config.corpus:
        raise UserError("retriever.url is empty: set it, or retriever.corpus to start a service here")
    with RetrieverProcess(config, log_path) as process, process.kept_alive(warn):
        yield process.url
