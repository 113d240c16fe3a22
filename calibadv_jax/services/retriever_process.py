"""The retrieval service of a run: one that is running already, or a child process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.errors import UserError
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.retriever_client import RetrieverClient


class RetrieverProcess(ChildService):
    """The service as a child process: ready when the block begins, stopped when it ends.

    Args:
        log_path: the child's output.
    """

    def __init__(self, config: RetrieverConfig, log_path: Path):
        command = [sys.executable, "-m", "retriever.serve", "--build_if_missing"]
        command += ["--corpus_path", config.corpus, "--retriever_name", config.encoder]
        command += ["--index_path", config.index or f"{config.corpus}.index"]
        command += ["--retrieval_topk", str(config.topk), "--threads", str(config.threads)]
        if config.model:
            command += ["--retriever_model", config.model]
        if config.pages:
            command += ["--pages_path", config.pages]
        if config.reranker:
            command += ["--reranker_model", config.reranker]
        super().__init__("the retriever", command, log_path, config.start_timeout, "retriever.start_timeout")


def check_running(config: RetrieverConfig, warn: Callable[[str], object]) -> None:
    """Waits for a service of `config.url`, and asks whether those that are there rerank as the config says.

    Args:
        warn: told what is waited for.

    Raises:
        UserError: none can be reached within `config.patience` seconds, or they are others than the config
            asks for.
    """
    client = RetrieverClient(config, config.url, warn)
    client.check_reranker(client.health())


@contextmanager
def open_retriever(
    config: RetrieverConfig, log_path: Path, warn: Callable[[str], object]
) -> Iterator[str | list[str]]:
    """Base URLs of retrieval services: `config.url`, or of a child process that ends with the block.

    Args:
        warn: told what is waited for.

    Raises:
        UserError: neither is configured, the running service cannot be reached or is another one than the
            config asks for, or the child does not become ready.
    """
    if config.url:
        if config.url != NO_RETRIEVER:
            check_running(config, warn)
        yield config.url
        return
    if not config.corpus:
        raise UserError("retriever.url is empty: set it, or retriever.corpus to start a service here")
    with RetrieverProcess(config, log_path) as process:
        yield process.url
