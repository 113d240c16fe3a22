"""The vLLM workers of a run: child processes that it starts, or workers that run already."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.sampler.vllm_command import require_vllm
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.http_client import BadReply, HttpReply, Unreachable, Warn, request, wait_for_any

# A module or a class that an argument names.
_MODULE = re.compile(r"[A-Za-z_]\w*[.:][A-Za-z_]")
ASK_SECONDS = 30.0  # seconds that a worker may take to answer a question about its state


class VllmWorkerProcess(ChildService):
    """A vLLM worker as a child process, ready when the block begins, stopped when it ends."""

    def __init__(
        self,
        model: Path,
        log_path: Path,
        options: Mapping[str, object],
        *,
        name: str = "the vLLM worker",
        arguments: Sequence[str] = (),
        devices: str | None = None,
        start_timeout: float = 1800.0,
    ):
        """Prepare the process; nothing is started yet.

        Args:
            model: a HuggingFace folder with config.json and tokenizer.
            log_path: file that the worker's output is added to.
            options: options of `vllm_worker`, without dashes, and their values.
            name: of the worker, for messages.
            arguments: further words of its command line.
            devices: CUDA_VISIBLE_DEVICES of the worker; None: those of this process.
            start_timeout: seconds until it must be ready.
        """
        command = [sys.executable, "-m", "calibadv_jax.sampler.vllm_worker", "--model", str(model)]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        command += arguments
        environment = {}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        # Such as vLLM's --logits-processors.
        has_own_modules = any(_MODULE.search(argument) for argument in arguments)
        super().__init__(
            name, command, log_path, start_timeout, "sampler.start_timeout", environment, has_own_modules
        )


@contextmanager
def open_workers(
    config: SamplerConfig, model: Path, logs: Path, dtype: str, max_length: int, warn: Warn, first: int = 0
) -> Iterator[list[str]]:
    """Use the workers at `config.urls`, or start `config.workers` child processes for the block.

    Args:
        config: the section `sampler`.
        model: a HuggingFace folder with config.json and tokenizer, for child processes.
        logs: folder of the files with the output of child processes.
        dtype: precision of the child processes' weights and activations.
        max_length: number of tokens of the longest trajectory, for child processes.
        warn: takes a line for the user about a wait, or about a running worker that does not answer.
        first: number of the first child process, in names and log files.

    Yields:
        The URLs of the workers. Of running workers at least one answers; all child processes are ready.

    Raises:
        UserError: vLLM is not installed, no running worker answers, or a child process is not ready in time.
    """
    if config.urls:
        _, missing = find_workers(config, warn)
        for url, reason in missing.items():
            warn(f"vLLM worker {url} is left out until it answers: {reason}")
        yield config.urls
        return
    require_vllm()
    options: dict[str, object] = {
        "flavour": config.flavour,
        "dtype": dtype,
        "max_model_len": max_length,
        "max_num_seqs": config.slots,
    }
    workers = []
    with ExitStack() as stack:
        for index in range(config.workers):
            number = first + index
            worker = VllmWorkerProcess(
                model,
                logs / f"vllm_worker_{number}.log",
                options,
                name=f"vLLM worker {number}",
                arguments=config.worker_args,
                devices=config.worker_devices[index] if config.worker_devices else None,
                start_timeout=config.start_timeout,
            )
            stack.callback(worker.stop)
            worker.start()
            workers.append(worker)
        # Only now: they become ready side by side.
        for worker in workers:
            worker.wait()
        yield [worker.url for worker in workers]


def find_workers(config: SamplerConfig, warn: Warn) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask the workers at `config.urls` for their state, for `config.patience` seconds.

    Args:
        config: the section `sampler`.
        warn: takes a line for the user about the wait.

    Returns:
        The labels of the weights of workers that answer, and why the others do not, both by URL.

    Raises:
        UserError: none has answered in time, or a server is no vLLM worker of this project.
    """
    return wait_for_any(
        "vLLM worker",
        [url.rstrip("/") for url in config.urls],
        ask_label,
        timeout=ASK_SECONDS,
        patience=config.patience,
        advice="start it with scripts/launch_vllm_worker.sh or correct sampler.urls",
        say=warn,
    )


async def ask_label(http: ClientSession, url: str) -> Any:
    """Ask a worker for the label of its weights. The answer comes between two steps of the engine.

    Args:
        http: the session to ask in.
        url: address of the worker.

    Returns:
        The label, as the worker gives it.

    Raises:
        UserError: the server is no vLLM worker of this project, or the address is not a URL.
        Unreachable: it does not answer in time, or says that it cannot serve now.
    """
    try:
        reply = await _get(http, f"{url}/weight_info")
        if reply.is_unavailable:
            raise Unreachable(f"status {reply.status}")
        return json.loads(reply.body)["weight_version"]
    except (BadReply, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{url}: no /weight_info; start the worker with scripts/launch_vllm_worker.sh"
        ) from error


async def ask_alive(http: ClientSession, url: str) -> None:
    """Check that a worker is alive. It answers also during a weight swap and a long step of the engine.

    Args:
        http: the session to ask in.
        url: address of the worker.

    Raises:
        Unreachable: the server does not answer in time, or its engine is dead.
        UserError: the address is not a URL.
    """
    try:
        reply = await _get(http, f"{url}/health")
    except BadReply as error:
        raise Unreachable(f"/health: {error}") from error
    if reply.is_unavailable:
        raise Unreachable(f"/health: status {reply.status}")


async def _get(http: ClientSession, url: str) -> HttpReply:
    """Ask on a connection of its own: one of a server that has ended would never answer."""
    timeout = ClientTimeout(ASK_SECONDS)
    return await request(http, "GET", url, headers={"connection": "close"}, timeout=timeout)
